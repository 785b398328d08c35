"""Look at the documentation and at JupyterLab in a real browser."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs the package chromium")]
WIDTHS = {"phone": 390, "desktop": 1280}


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def site():
    """Build the documentation, and return its folder. A warning, such as a dead internal link, is an error."""
    folder = ROOT / "output" / "docs"
    command = ["--quiet", "--fail-on-warning", "--keep-going", "--doctree-dir", folder / ".doctrees", "docs", folder]
    done = subprocess.run([sys.executable, "-m", "sphinx", *command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_every_page_of_the_site_fits_and_shows_its_pictures(browser, site):
    pages = sorted(file.relative_to(site) for file in site.rglob("*.html") if "_static" not in file.parts)
    assert len(pages) > 20
    for width in WIDTHS.values():
        page = browser.new_page(viewport={"width": width, "height": 900})
        problems: list[str] = []
        page.on("requestfailed", lambda request, problems=problems: problems.append(request.url))
        page.on("pageerror", lambda error, problems=problems: problems.append(str(error)))
        for file in pages:
            page.goto(f"file://{site / file}")
            empty = page.evaluate("[...document.images].filter(image => !image.naturalWidth).map(image => image.src)")
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert (empty, problems) == ([], []), file
            assert wide <= width, f"{file} is {wide} pixels wide at {width}"
        page.close()


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Start JupyterLab on a copy of 00_explore, as `./run_all.sh lab` does; return its address and the copy."""
    folder = tmp_path_factory.mktemp("lab")
    copy = Path(shutil.copy(ROOT / "notebooks" / "00_explore.ipynb", folder))
    options = [
        "--no-browser",
        "--allow-root",
        "--expose-app-in-browser",
        "--port=0",
        "--IdentityProvider.token=",
        f"--ServerApp.root_dir={folder}",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JUPYTER_PLATFORM_DIRS": "1"}
    server = subprocess.Popen(
        ["jupyter", "lab", *options], stderr=subprocess.PIPE, text=True, env=environment, cwd=folder
    )
    for line in server.stderr:
        found = re.search(r"(http://localhost:\d+)/lab", line)
        if found:
            break
    yield found[1], copy
    server.terminate()
    server.wait()


def test_00_explore_runs_in_jupyterlab_and_its_sliders_move(browser, lab):
    address, copy = lab
    page = browser.new_page(viewport={"width": 1280, "height": 2000})
    page.goto(f"{address}/lab/tree/{copy.name}")
    kernel = page.locator("#jp-main-statusbar").get_by_text("Python 3 (ipykernel) |")
    expect(kernel).to_contain_text("Idle", timeout=60_000)

    def execute(command):
        page.evaluate(f"void window.jupyterapp.commands.execute('{command}')")

    execute("notebook:run-all-cells")
    for _ in range(60):
        page.wait_for_timeout(3000)
        execute("docmanager:save")
        with suppress(json.JSONDecodeError):  # JupyterLab is writing it
            cells = [cell for cell in json.loads(copy.read_text())["cells"] if cell["cell_type"] == "code"]
            if all(cell["execution_count"] for cell in cells):
                break
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert all(cell["execution_count"] for cell in cells), "it ends within three minutes"
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 4
    assert "Warning" not in "".join("".join(output.get("text", "")) for output in outputs)

    slider = page.locator(".widget-slider").first  # cells that were in view once stay on the page
    slider.scroll_into_view_if_needed()
    readout = slider.locator(".widget-readout")
    before = readout.inner_text()
    slider.locator(".noUi-handle").focus()
    page.keyboard.press("ArrowRight")
    expect(readout).not_to_have_text(before)
