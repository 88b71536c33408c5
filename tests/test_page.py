"""The chat page in a headless browser. Needs the package playwright and Debian's chromium-headless-shell."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest
from serving import PATIENCE, Served, served
from test_library import folder

import outpace

sync_api = pytest.importorskip("playwright.sync_api")
BROWSER = shutil.which("chromium-headless-shell") or shutil.which("chromium")
pytestmark = [pytest.mark.long, pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = folder(tmp_path_factory.mktemp("served"), "target", max_position_embeddings=4096)
    with outpace.load(model, "layers:0") as llm:
        llm.tokenizer.stop_ids = frozenset()  # answers reach max_tokens
        with served(llm) as site:
            yield site


@pytest.fixture
def page(site: Served) -> Iterator[Any]:
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page()
        page.requests, page.troubles = [], []
        page.on("request", lambda request: page.requests.append(request.url))
        page.on("console", lambda said: page.troubles.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: page.troubles.append(str(error)))
        page.goto(f"http://127.0.0.1:{site.port}/")
        yield page
        own = (f"http://127.0.0.1:{site.port}/", "data:")
        assert [url for url in page.requests if not url.startswith(own)] == []
        assert page.troubles == []
        browser.close()


def ask(page: Any, text: str, most: int) -> None:
    page.fill("#ask", text)
    page.fill("#most", str(most))
    page.click("#send")


def until(page: Any, expression: str) -> None:
    """Wait until an expression is true. The page's policy does not allow Playwright's own wait_for_function."""
    end = time.monotonic() + PATIENCE
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(20)


def test_drafted_tokens_are_coloured(site: Served, page: Any) -> None:
    ask(page, "hello hello hello", 40)
    page.wait_for_selector("button.compare:visible")
    counts = {name: int(page.evaluate(f"document.body.dataset.{name}")) for name in ("tokens", "drafted")}
    body = {"temperature": 0, "max_tokens": 40, "return_sources": True}
    found = site.chat("hello hello hello", **body).json
    assert page.inner_text(".turn.assistant > div").strip() == found["choices"][0]["message"]["content"].strip()
    assert counts["tokens"] == found["usage"]["completion_tokens"]
    assert (counts["drafted"] > 0) == (page.locator(".turn.assistant .drafted").count() > 0)
    assert page.locator("#tree rect").count() >= 1
    page.click("button.compare")
    page.wait_for_selector(".same")
    assert "equal text" in page.inner_text(".same")


def test_an_answer_can_be_stopped(site: Served, page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = site.llm.engine.step
    monkeypatch.setattr(
        site.llm.engine, "step", lambda *given: (time.sleep(0.01), step(*given))
    )  # otherwise it may end before the click
    ask(page, "hello", 4000)
    until(page, "Number(document.body.dataset.tokens) > 3")
    page.click("#stop")
    until(page, "document.querySelector('.foot').textContent.includes('stopped after')")
    monkeypatch.undo()
    site.wait_idle()
    ask(page, "12", 10)
    page.wait_for_selector("button.compare:visible")


def test_a_click_on_an_example(page: Any) -> None:
    page.fill("#most", "5")
    page.click(".examples button >> nth=1")
    assert "linked list" in page.inner_text(".turn.user")
    page.wait_for_selector("button.compare:visible")
    page.click("#new")
    assert page.locator(".turn").count() == 0
    assert page.locator(".examples button").count() == 3


def test_fenced_lines_are_code(page: Any) -> None:
    page.evaluate(
        """() => {
            const node = document.createElement("div"), ink = new Ink(node);
            document.body.append(node);
            const said = ["a ``` b\\n`", "``py\\nx =", " 1\\n```", "\\nend"];
            said.forEach((text, place) => ink.write(text, place % 2 ? "ngram" : "target"));
            node.id = "inked";
        }"""
    )
    assert page.text_content("#inked") == "a ``` b\n```py\nx = 1\n```\nend"
    assert "".join(page.locator("#inked .code").all_text_contents()) == "``py\nx = 1\n```\n"
    assert page.locator("#inked .by-ngram:not(.code)").all_text_contents() == ["end"]


def test_errors_are_shown_as_text(page: Any) -> None:
    ask(page, "<img src=x onerror=alert(1)> " * 2000, 10)
    page.wait_for_selector(".foot.differs")
    assert "maximum context length" in page.inner_text(".foot.differs")
    assert page.locator(".turn img").count() == 0
    page.troubles.clear()  # the browser reports the status 400
