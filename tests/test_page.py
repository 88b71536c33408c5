"""The chat page in a headless browser. Needs the package playwright and Debian's chromium-headless-shell."""

from __future__ import annotations

import random
import re
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(site: Served, browser: Any) -> Iterator[Any]:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.requests, page.troubles = [], []
    page.on("request", lambda request: page.requests.append(request.url))
    page.on("console", lambda said: page.troubles.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: page.troubles.append(str(error)))
    page.goto(f"http://127.0.0.1:{site.port}/")
    yield page
    own = (f"http://127.0.0.1:{site.port}/", "data:")
    assert [url for url in page.requests if not url.startswith(own)] == []
    assert page.troubles == []
    context.close()


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


def drawn(page: Any, pieces: list[str]) -> str:
    """Return the HTML of an answer that arrives in these pieces, drawn after each; its drafters take turns."""
    return page.evaluate(
        """(pieces) => {
            const node = make("div", "text"), ink = new Ink(node);
            pieces.forEach((piece, place) => {
                ink.add(piece, [piece], [["target", "ngram", "model"][place % 3]]);
                ink.draw();
            });
            $("turns").replaceChildren(make("div", "turn assistant"));
            $("turns").lastChild.append(node);
            return node.innerHTML;
        }""",
        pieces,
    )


def copied(page: Any, button: str) -> str:
    page.click(button)
    until(page, f"document.querySelector('{button}').textContent === 'Copied'")
    return page.evaluate("navigator.clipboard.readText()")


def test_drafted_tokens_are_coloured(site: Served, page: Any) -> None:
    ask(page, "hello hello hello", 40)
    page.wait_for_selector("button.compare:visible")
    counts = {name: int(page.evaluate(f"document.body.dataset.{name}")) for name in ("tokens", "drafted")}
    body = {"temperature": 0, "max_tokens": 40, "return_sources": True}
    found = site.chat("hello hello hello", **body).json
    assert copied(page, ".foot .copy") == found["choices"][0]["message"]["content"]
    assert counts["tokens"] == found["usage"]["completion_tokens"]
    assert (counts["drafted"] > 0) == (page.locator(".turn.assistant .drafted").count() > 0)
    assert page.locator("#tree rect").count() >= 1
    page.click("button.compare")
    page.wait_for_selector(".same")
    assert "equal text" in page.inner_text(".same")


def test_each_turn_is_asked_with_the_turns_before_it(page: Any) -> None:
    asked: list[Any] = []
    page.on("request", lambda sent: asked.append(sent.post_data_json["messages"]) if sent.method == "POST" else None)
    for text in ("hello", "<b> " * 20_000, "12", "again"):  # the second one is longer than the model's context
        ask(page, text, 8)
        page.wait_for_selector(".turn.assistant:last-child .foot")
    assert [[turn["role"][0] for turn in turns] for turns in asked] == [
        ["u"],
        ["u", "a", "u"],
        ["u", "a", "u"],
        list("uauau"),
    ]
    assert [turn["content"] for turn in asked[3] if turn["role"] == "user"] == ["hello", "12", "again"]
    page.troubles.clear()  # the browser reports the status 400


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


MARKDOWN = """# Title

Some **bold** and *soft* `code`,
a [page](https://example.org) and &amp;.

1. one
   - nested
2. two

| a | b |
|---|--:|
| 1 | 2 |

> quoted

```py
x = 1

y = 2
```

end"""


def test_markdown_is_drawn(page: Any) -> None:
    drawn(page, [MARKDOWN])
    shown = {
        "h1": "Title",
        "strong": "bold",
        "em": "soft",
        "p code": "code",
        "ol > li > ul > li": "nested",
        "td[align=right]": "2",
        "blockquote": "quoted",
        ".bar": "pyCopy",
        "pre": "x = 1\n\ny = 2\n",
        ".text > p:last-child": "end",
    }
    assert {selector: page.text_content(f"#turns {selector}").strip("\n") for selector in shown} == {
        selector: text.strip("\n") for selector, text in shown.items()
    }
    link = page.locator("#turns a")
    assert [link.get_attribute(name) for name in ("href", "rel", "target")] == [
        "https://example.org",
        "noopener noreferrer",
        "_blank",
    ]
    assert copied(page, ".code .copy") == "x = 1\n\ny = 2\n"


@pytest.mark.parametrize(
    "text",
    [
        "<script>document.title = 'ran'</script>",
        "a <img src=x onerror=\"document.title='ran'\"> <b>b</b>",
        "<svg/onload=document.title='ran'>\n\n<iframe src='javascript:parent.document.title=1'></iframe>",
        "[a](javascript:document.title='ran') and [b](JAVA&#115;cript:alert) [c](data:text/html,x) [d](/metrics)",
        "<math><mtext><table><mglyph><style><img src=x onerror=document.title='ran'></style></table></mtext></math>",
        "<style>body{display:none}</style><link rel=stylesheet href=//example.org><base href=//example.org>",
    ],
)
def test_html_and_odd_links_are_shown_as_text(page: Any, text: str) -> None:
    drawn(page, [text])
    allowed = {"p", "em", "span"}
    assert set(page.evaluate("[...document.querySelectorAll('.text *')].map((one) => one.localName)")) <= allowed
    assert "".join(page.text_content(".text").split()) == "".join(text.split())
    assert page.troubles == []
    kept = "(text) => [...DOMPurify.sanitize(text, ALLOWED).querySelectorAll('*')].map((one) => one.localName)"
    assert set(page.evaluate(kept, text)) <= {"b", "table"}  # the second bolt holds without the first
    page.troubles.clear()  # the policy refuses styles
    assert page.title() == "outpace"


@pytest.mark.parametrize("text", ["![a dog](https://example.org/dog.png)", "![](http://example.org/x.gif)"])
def test_images_are_links(page: Any, text: str) -> None:
    drawn(page, ["see ", text])
    assert page.locator(".text a[href][rel~=noopener]").count() == 1
    assert page.locator(".text img").count() == 0


def test_what_is_nested_too_deeply_is_plain_text(page: Any) -> None:
    drawn(page, ["before\n\n", "> " * 5000])
    assert page.text_content(".text").replace("\n", "") == "before" + "> " * 5000


def test_an_answer_that_arrives_is_drawn_as_the_whole_one(page: Any) -> None:
    def bare(html: str) -> str:
        return re.sub("</?span[^>]*>", "", html)

    whole, draw = bare(drawn(page, [MARKDOWN])), random.Random(1)
    for _ in range(20):
        cuts = sorted(draw.sample(range(1, len(MARKDOWN)), 40))
        pieces = [MARKDOWN[start:end] for start, end in zip([0, *cuts], [*cuts, len(MARKDOWN)], strict=True)]
        assert bare(drawn(page, pieces)) == whole


def test_blocks_that_are_complete_stay(page: Any) -> None:
    counts = page.evaluate(
        r"""() => {
            const node = make("div"), ink = new Ink(node);
            ink.add("one\n\n```\na\n```\n\n- x\n", [], []);
            ink.draw();
            const first = [...node.children];
            ink.add("- y\n\nend", [], []);
            ink.draw();
            return [first.length, first.filter((child) => child.isConnected || child.parentNode === node).length];
        }"""
    )
    assert counts == [3, 2]  # the list has grown


@pytest.mark.parametrize(
    "pieces",
    [
        ["a ", "**b**", " c"],
        ["x\n\n", "```py\nx = 1\n", "```\nend"],
        ["1. one\n", "2. **two** `one`\n", "3. one"],
        ["| a | b |\n|---|---|\n", "| a | c |\n", "| b | d |"],
        ["[page](https://example.org/to) ", "to ", "the page"],
        ["&lt; a ", "\\*b\\* ", "*c* \u00e9\U0001f389"],
    ],
)
def test_words_have_the_colour_of_their_own_token(page: Any, pieces: list[str]) -> None:
    drawn(page, pieces)
    words = {name: "".join(page.locator(f".text .by-{name}").all_text_contents()) for name in ("ngram", "model")}
    for name, piece in (("ngram", pieces[1]), ("model", pieces[2])):
        kept = "".join(letter for letter in piece.replace("```py", "") if letter.isalnum())
        assert "".join(letter for letter in words[name] if letter.isalnum()) == kept.lstrip("23")


def test_colours_can_be_switched_off(page: Any) -> None:
    colour = "getComputedStyle(document.querySelector('.drafted')).backgroundColor"
    drawn(page, ["a ", "b"])
    shown = page.evaluate(colour)
    page.click("#colours")
    page.reload()
    drawn(page, ["a ", "b"])
    assert page.evaluate(colour) == "rgba(0, 0, 0, 0)" != shown
    page.click("#colours")
    page.reload()
    drawn(page, ["a ", "b"])
    assert page.evaluate(colour) == shown


def test_copying_without_the_clipboard_s_interface(page: Any) -> None:
    drawn(page, ["```\nx = 1\n```"])
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true })")
    page.click(".code .copy")
    until(page, "document.querySelector('.code .copy').textContent === 'Copied'")
    page.evaluate("delete navigator.clipboard")
    assert page.evaluate("navigator.clipboard.readText()") == "x = 1\n"


def test_errors_are_shown_as_text(page: Any) -> None:
    ask(page, "<img src=x onerror=alert(1)> " * 2000, 10)
    page.wait_for_selector(".foot.differs")
    assert "maximum context length" in page.inner_text(".foot.differs")
    assert page.locator(".turn img").count() == 0
    page.troubles.clear()  # the browser reports the status 400
