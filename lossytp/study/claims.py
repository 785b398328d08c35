"""The paper's claims, each with the condition on the results under which its sentence is true."""

from typing import Any

def check_claims(paper: dict[str, Any]) -> dict[str, Any]:
    """Placeholder."""
    return {}
