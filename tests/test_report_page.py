"""The page of the report in a real browser: Debian's chromium, driven by Playwright (extra `browser`)."""

from __future__ import annotations

import re
import shutil
import struct
import zlib

import pytest
from made_runs import make_run, make_sweep

from seqmix.report.page import page
from seqmix.report.results import build_report
from seqmix.report.runs import find_runs

playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install -e '.[browser]'")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium on PATH: apt-get install chromium")
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def write_page(folder, root) -> str:
    (folder / "index.html").write_text(page(build_report(find_runs([root]), "A sweep"), "python -m seqmix.report x"))
    return (folder / "index.html").as_uri()


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Two tasks, three models, three lengths, two rates, two seeds; the Transformer ran out of memory at L=256."""
    folder = tmp_path_factory.mktemp("page")
    models, failing = ("transformer", "mamba", "lstm"), {n: "oom" for n in range(8, 12)} | {58: "killed", 66: "diverged"}
    root = make_sweep(folder / "s", models, ("copy", "selective_copy"), lrs=(1e-3, 2e-3), failing=failing)
    return write_page(folder, root)


@pytest.fixture
def open_page(chromium):
    """open_page(address, **context options) -> page; at the end nothing was fetched and nothing was complained of."""
    contexts, complaints = [], []

    def open_(address: str, **options):
        context = chromium.new_context(**({"viewport": DESKTOP} | options))
        contexts.append(context)
        view = context.new_page()
        view.on("console", lambda message: complaints.append(message.text))
        view.on("pageerror", lambda error: complaints.append(str(error)))
        view.on("request", lambda r: complaints.append(r.url) if r.url != address and not r.url.startswith("data:") else None)
        view.goto(address)
        return view

    yield open_
    for context in contexts:
        context.close()
    assert complaints == []


def colours(png: bytes) -> int:
    """How many different pixels a screenshot has (8-bit RGB or RGBA, not interlaced), in one row out of eight."""
    at, data = 8, b""
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        if kind == b"IHDR":
            width, height, depth, form = struct.unpack(">IIBB", png[at + 8 : at + 18])
            assert depth == 8
        data += png[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += 12 + length
    channels = {2: 3, 6: 4}[form]
    stride = width * channels + 1
    raw = zlib.decompress(data)
    return len({raw[i : i + channels] for y in range(0, height, 8) for i in range(y * stride + 1, (y + 1) * stride, channels)})


def test_all_sections_are_drawn_and_nothing_is_fetched(open_page, sweep):
    view = open_page(sweep)
    assert view.title() == "A sweep · seqmix report"
    assert "72 runs" in view.inner_text(".headline") and "out of memory" in view.inner_text(".headline")
    # accuracy and four costs; three trade-offs; a chart of curves and one of rates for each length
    for section, figures in (("against-length", 5), ("trade-offs", 3), ("curves", 3), ("rates", 3)):
        assert view.locator(f"#{section} figure svg").count() == figures, section
    charts = view.locator("#against-length figure svg")
    assert charts.first.locator("g.series path.line").count() == 3
    assert sorted(charts.first.locator("text.name").all_text_contents()) == ["lstm", "mamba", "transformer"]
    for i in range(5):
        assert "sequence length, tokens (log₂)" in charts.nth(i).text_content()
    for caption in ("Training speed tokens/s ↑", "Time per step ms ↓", "Peak memory MiB ↓", "State bytes per row ↓"):
        assert caption in view.inner_text("#against-length"), caption
    assert colours(view.screenshot()) > 50


def test_a_failed_cell_is_shown_where_its_number_would_be(open_page, sweep):
    view = open_page(sweep)
    assert view.locator("#matrix td.no").all_inner_texts() == ["out of memory"]
    assert view.locator("#against-length figure").first.locator("g.fail").count() == 1
    assert view.locator("#cells tr.cell:visible td.none").first.inner_text() == "out of memory"
    assert "4 of 6 shown" in view.inner_text("#failures-count"), "two are of the other task"
    view.get_by_role("button", name="selective_copy").click()
    assert view.locator("#failures tbody tr:visible").count() == 2
    assert view.locator("#matrix td.no").count() == 0 and "of 2 finite" in view.inner_text("#matrix")


def test_filters_reach_every_chart_and_table(open_page, sweep):
    view = open_page(sweep)
    rows = view.locator("#cells tr.cell:visible")
    assert rows.count() == 9
    view.locator("[data-filter-model=mamba]").click()
    assert view.locator("[data-filter-model=mamba]").get_attribute("aria-pressed") == "false"
    assert rows.count() == 6 and view.locator("#matrix tbody tr").count() == 2
    for section in ("against-length", "trade-offs", "curves", "rates"):
        assert view.locator(f"#{section} [data-series=mamba]").count() == 0, section
        assert view.locator(f"#{section} [data-series=lstm]").count() > 0, section
    view.locator("[data-filter-length='64']").click()
    assert rows.count() == 4 and view.locator("#matrix thead th").all_inner_texts()[1:] == ["L = 128", "L = 256"]
    assert view.locator("#curves figure").count() == 2
    for name in ("lstm", "transformer"):
        view.locator(f"[data-filter-model={name}]").click()
    assert rows.count() == 6, "the last one off means all on again"


def test_the_scale_follows_the_filter(open_page, sweep):
    view = open_page(sweep)
    state = view.locator("#against-length figure").nth(4)
    before = state.inner_text()
    view.locator("[data-filter-model=transformer]").click()
    assert "State" in before and state.inner_text() != before


def test_choices_change_what_is_drawn(open_page, sweep):
    view = open_page(sweep)
    first = view.locator("#against-length figure").first
    view.get_by_role("button", name="Loss", exact=True).click()
    assert "Loss (test) nats per token ↓" in first.inner_text()
    assert "loss (test)" in view.locator("#trade-offs figure").first.inner_text()
    assert view.locator("circle.seed").count() == 0
    view.get_by_role("button", name="each seed").click()
    assert view.locator("#against-length circle.seed").count() > 20
    view.get_by_role("button", name="logarithmic costs").click()
    assert "log scale" not in view.inner_text("#against-length")
    view.locator("#overview select").select_option(label="Parameters")
    assert "91,000" in view.inner_text("#matrix")
    view.locator("#trade-offs .tools button", has_text="64").click()
    assert view.locator("#trade-offs figure").first.locator("g.series").count() == 3


def test_a_point_tells_its_numbers(open_page, sweep):
    view = open_page(sweep)
    point = view.locator("#against-length figure").first.locator("[data-series=mamba] .mark").nth(1)
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    view.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    told = view.inner_text("#tip")
    assert "mamba, L = 128" in told and "95 % interval" in told and "2 of 2 seeds" in told and "lr 0.002" in told
    view.mouse.move(2, 2)
    assert view.locator("#tip").is_hidden()


def test_light_and_dark_by_the_system_and_by_the_button(open_page, sweep):
    paper = "getComputedStyle(document.body).backgroundColor"
    light, dark = open_page(sweep, color_scheme="light"), open_page(sweep, color_scheme="dark")
    assert light.evaluate(paper) == "rgb(253, 253, 251)" and dark.evaluate(paper) == "rgb(20, 22, 26)"
    for view, after in ((light, "rgb(20, 22, 26)"), (dark, "rgb(253, 253, 251)")):
        view.click("#theme")
        assert view.evaluate(paper) == after
        view.reload()
        assert view.evaluate(paper) == after, "remembered"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_stand_out_from_the_page(open_page, sweep, scheme):
    """WCAG 2.1: 4.5 for text, 3 for lines."""
    view = open_page(sweep, color_scheme=scheme)
    ratio = """(name) => {
      const probe = document.createElement("i");
      document.body.append(probe);
      const linear = (v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
      const light = (value) => {
        probe.style.color = value;
        const [r, g, b] = getComputedStyle(probe).color.match(/[\\d.]+/g).map((v) => linear(v / 255));
        return .2126 * r + .7152 * g + .0722 * b;
      };
      const [a, b] = [light(`var(${name})`), light("var(--paper)")].sort((p, q) => q - p);
      return (a + .05) / (b + .05);
    }"""
    for name in ("--ink", "--soft", "--bad", "--good", "--accent"):
        assert view.evaluate(ratio, name) >= 4.5, name
    for i in range(8):
        assert view.evaluate(ratio, f"--c{i}") >= 3, i


def test_a_phone_scrolls_down_and_not_sideways(open_page, sweep):
    view = open_page(sweep, viewport=PHONE, has_touch=True, is_mobile=True, device_scale_factor=2)
    assert view.evaluate("document.documentElement.scrollWidth") == 390
    chart = view.locator("#against-length figure svg").first
    assert 300 < chart.bounding_box()["width"] <= 390
    assert view.locator("#against-length .legend").is_visible()
    size = chart.locator("text").first.evaluate("node => parseFloat(getComputedStyle(node).fontSize)")
    assert size >= 10, "text is not scaled with the chart"
    mark = chart.locator("[data-series=lstm] .mark").first
    mark.scroll_into_view_if_needed()
    mark.tap()
    tip = view.locator("#tip")
    assert tip.is_visible() and tip.bounding_box()["x"] + tip.bounding_box()["width"] <= 390
    view.set_viewport_size({"width": 844, "height": 390})
    view.locator("#against-length figure svg[viewBox^='0 0 7']").first.wait_for()  # drawn again, wider


def test_rows_are_sorted_and_opened_and_their_command_is_there(open_page, sweep):
    view = open_page(sweep)
    view.locator("#cells thead button", has_text="Token accuracy").click()
    column = view.locator("#cells thead th").all_inner_texts()
    i = next(n for n, text in enumerate(column) if text.startswith("Token accuracy"))
    read = f"[...document.querySelectorAll('#cells tr.cell:not([hidden])')].map((r) => r.children[{i}].dataset.v)"
    up = view.evaluate(read)
    numbers = [float(value) for value in up if value]
    assert numbers == sorted(numbers) and up[-1] == "", "without a number: last"
    view.locator("#cells thead button", has_text="Token accuracy").click()
    assert [float(v) for v in view.evaluate(read) if v] == sorted(numbers, reverse=True) and view.evaluate(read)[-1] == ""
    view.locator("#cells tr.cell:visible .open").first.click()
    more = view.locator("#cells tr.more:visible")
    assert more.count() == 1 and "python train.py -m model=" in more.inner_text()
    assert "(another learning rate)" in more.inner_text()
    more.locator(".copy button").first.click()
    more.locator(".copy button", has_text=re.compile("copied|selected")).wait_for()


def test_without_a_script_the_tables_are_complete(open_page, sweep):
    view = open_page(sweep, java_script_enabled=False)
    assert view.locator("#cells tr.cell").count() == 18 and view.locator("#cells tr.cell").last.is_visible()
    assert view.locator("#failures tbody tr").count() == 6 and view.locator("#against-length").is_hidden()


@pytest.mark.parametrize("statuses", [["complete"], ["failed", "oom"], ["unfinished"]])
def test_a_page_of_little_or_nothing_still_opens(open_page, tmp_path, statuses):
    for i, status in enumerate(statuses):
        make_run(tmp_path / f"s/{i}", seed=i, status=status)
    view = open_page(write_page(tmp_path, tmp_path / "s"))
    assert view.locator("#cells tr.cell").count() == 1 and view.locator("#matrix td").count() == 1
