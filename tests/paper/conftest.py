"""Provide the made-up records of `tests.study`."""

from tests.study.conftest import curves, record, study  # noqa: F401
