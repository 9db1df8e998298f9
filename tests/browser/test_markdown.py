"""Rendering of answers in a browser, and texts that try to become script, style or requests."""

import json

import pytest

from tests.browser.conftest import Chat, files_of

RENDER = """async text => {
    const {render} = await import("./ui/markdown.js");
    const element = document.createElement("div");
    render(element, text);
    return element.innerHTML.replaceAll(' xmlns="http://www.w3.org/1998/Math/MathML"', "");
}"""
LINK = 'rel="noopener noreferrer" target="_blank"'


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a\nb", "<p>a\nb</p>"),
        ("a  \nb", "<p>a<br>b</p>"),
        ("# One\n## Two #", "<h2>One</h2><h3>Two #</h3>"),
        ("**b** *i* ***bi*** ~~s~~", None),
        ("snake_case_name 2 * 3 * 4", "<p>snake_case_name 2 * 3 * 4</p>"),
        ("_i_ __b__", "<p><em>i</em> <strong>b</strong></p>"),
        ("**not closed", "<p>**not closed</p>"),
        ("`a*b*` ``c`d``", "<p><code>a*b*</code> <code>c`d</code></p>"),
        ("\\*a\\*", "<p>*a*</p>"),
        ("- a\n- b", "<ul><li>a</li><li>b</li></ul>"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("- a\n  - b\n- c", "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>"),
        ("text\n- a", "<p>text</p><ul><li>a</li></ul>"),
        ("1. a\n\n   ```\n   x\n   ```\n2. b", None),
        ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
        ("---", "<hr>"),
        ("|a|b|\n|-|-:|\n|c \\| d|1|", None),
        ("[a](https://b.c/d)", f'<p><a href="https://b.c/d" {LINK}>a</a></p>'),
        ("[a](https://b.c/d_(e))", f'<p><a href="https://b.c/d_(e)" {LINK}>a</a></p>'),
        ("(https://b.c).", f'<p>(<a href="https://b.c/" {LINK}>https://b.c</a>).</p>'),
        ("![a](https://b.c/d.png)", f'<p><a href="https://b.c/d.png" {LINK}>a</a></p>'),
        ("<https://b.c>", f'<p>&lt;<a href="https://b.c/" {LINK}>https://b.c</a>&gt;</p>'),
        ("<b>a</b> &lt;", "<p>&lt;b&gt;a&lt;/b&gt; &amp;lt;</p>"),
        ("It costs $5 and $6.", "<p>It costs $5 and $6.</p>"),
    ],
)
def test_markdown(one_page, text, html):
    found = one_page.evaluate(RENDER, text)
    expected = {
        "**b** *i* ***bi*** ~~s~~": "<p><strong>b</strong> <em>i</em> "
        "<strong><em>bi</em></strong> <del>s</del></p>",
        "1. a\n\n   ```\n   x\n   ```\n2. b": '<ol><li>a<div class="code"><div class="row">'
        '<span class="dim">code</span><span class="space"></span>'
        '<button class="quiet">Copy</button></div><pre tabindex="0" role="group" '
        'aria-label="code"><code>x</code></pre></div></li><li>b</li></ol>',
        "|a|b|\n|-|-:|\n|c \\| d|1|": '<div class="scroll" tabindex="0" role="group" '
        'aria-label="Table"><table><thead><tr><th>a</th><th class="number">b</th></tr></thead>'
        '<tbody><tr><td>c | d</td><td class="number">1</td></tr></tbody></table></div>',
    }
    assert found == (html or expected[text])


@pytest.mark.parametrize(
    ("source", "mathml"),
    [
        ("x^2", "<msup><mi>x</mi><mn>2</mn></msup>"),
        ("a_{ij}'", None),
        (r"\frac12", "<mfrac><mn>12</mn></mfrac>"),
        (r"\frac{a}{b}", "<mfrac><mrow><mi>a</mi></mrow><mrow><mi>b</mi></mrow></mfrac>"),
        (r"\sqrt[3]{x}", "<mroot><mrow><mi>x</mi></mrow><mrow><mn>3</mn></mrow></mroot>"),
        (r"\alpha \le \beta", '<mi>\u03b1</mi><mo stretchy="false">≤</mo><mi>β</mi>'),
        (r"\text{if } x", "<mtext>if </mtext><mi>x</mi>"),
        (r"\mathbb{R}", "<mi>\u211d</mi>"),
        (r"\sin x", "<mi>sin</mi><mi>x</mi>"),
        ("1.5", "<mn>1.5</mn>"),
    ],
)
def test_formulas(one_page, source, mathml):
    if source == "a_{ij}'":
        mathml = "<msubsup><mi>a</mi><mrow><mi>i</mi><mi>j</mi></mrow><mo>\u2032</mo></msubsup>"
    if source == r"\frac12":
        mathml = "<mfrac><mn>1</mn><mn>2</mn></mfrac>"
    html = f'<p><math display="inline"><mrow>{mathml}</mrow></math></p>'
    for text in (f"${source}$", f"\\({source}\\)"):
        assert one_page.evaluate(RENDER, text) == html
    for text in (f"$${source}$$", f"\\[\n{source}\n\\]"):
        assert '<math display="block">' in one_page.evaluate(RENDER, text)


@pytest.mark.parametrize(
    "source", [r"\unknown{x}", "{", "}", "x^", r"\left(x", r"\begin{table}x\end{table}", "^2", "&"]
)
def test_formulas_that_are_not_known_are_shown_as_source(one_page, source):
    text = one_page.evaluate(RENDER, f"a ${source}$ b").replace("&amp;", "&")
    assert text == f"<p>a <code>{source}</code> b</p>"


HOSTILE = [
    "<script>document.title='run'</script>",
    "<img src=x onerror=\"document.title='run'\">",
    "<svg onload=document.title='run'><style>*{color:red}</style></svg>",
    "<iframe srcdoc='<script>1</script>'></iframe><base href=//evil.example>",
    "[a](javascript:document.title='run')",
    "[a](JaVaScRiPt&colon;document.title='run')",
    "[a](\tjavascript:document.title='run')",
    "[a](java\nscript:document.title='run')",
    "[a](data:text/html,<script>1</script>)",
    "[a](vbscript:x) [b](file:///etc/passwd) [c](blob:x) [d](//evil.example) [e](../admin)",
    "![a](javascript:document.title='run') ![b](https://evil.example/p.png)",
    "<javascript:document.title='run'>",
    '[a](https://a.b/"onmouseover="document.title=1)',
    '[a](https://a.b "title" onclick=x)',
    "[![x](https://evil.example/1.png)](javascript:1)",
    "`<script>`\n```html onload=x\n</code></pre><script>document.title='run'</script>\n```",
    "```\" onclick=\"document.title='run'\n x\n```",
    "|<img src=x onerror=document.title='run'>|\n|-|\n|<script>1</script>|",
    "$\\text{</mtext><script>document.title='run'</script>}$",
    "$\\href{javascript:document.title='run'}{x}$ $\\style{x}{y}$ $\\class{a}{b}$",
    "$$\\begin{__proto__}x\\end{__proto__} \\constructor \\toString \\__proto__$$",
    "$\\constructor$ $\\hasOwnProperty$ $\\begin{constructor}x\\end{constructor}$",
    "> " * 50 + "deep",
    "\n".join("  " * i + "- x" for i in range(60)),
    "\u202e\u0000\ufeff\u2028<script>1</script>",
    "__proto__ constructor <template><script>1</script></template>",
]
SAFE_TAGS = {
    *("p", "h2", "h3", "h4", "h5", "h6", "hr", "blockquote", "ul", "ol", "li", "table", "thead"),
    *("tbody", "tr", "th", "td", "div", "span", "pre", "code", "button", "br", "a", "strong", "em"),
    "del",
}
SAFE_ATTRIBUTES = {
    *("class", "href", "rel", "target", "start", "tabindex", "role", "aria-label", "display"),
    *("stretchy", "width", "accent"),
}


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_are_texts(one_page, text):
    found = one_page.evaluate(
        """async text => {
            const {render} = await import("./ui/markdown.js");
            const element = document.createElement("div");
            document.body.append(element);
            render(element, text);
            return [...element.querySelectorAll("*")].map(node => [node.localName,
                node.namespaceURI.split("/").pop(), node.getAttributeNames(), node.href ?? ""]);
        }""",
        text,
    )
    for name, space, attributes, href in found:
        assert name in SAFE_TAGS or space == "MathML"
        assert set(attributes) <= SAFE_ATTRIBUTES
        assert not href or href.startswith(("https://", "http://", "mailto:"))
    assert one_page.title() == "Octavo"


@pytest.mark.parametrize(
    "piece",
    [
        *("*a ", "**a", "_a_b", "`", "[", "[a](", "![", "<http://", "$", "$a", "\\(", "\\[", "~~"),
        *(
            "> ",
            "- ",
            "1. ",
            "#",
            "|",
            "| - ",
            "```\n",
            "$$\n",
            "\n",
            " ",
            "a  \n",
            "h",
            "https://",
        ),
        *("{", "\\frac", "x^", "\\left(", "- a\n\n", "***"),
    ],
)
def test_long_texts_end(one_page, piece):
    size = one_page.evaluate(
        """async text => {
            const {render} = await import("./ui/markdown.js");
            const element = document.createElement("div");
            render(element, text);
            render(element, `$${text.slice(0, 3000)}$`);
            return element.childNodes.length;
        }""",
        piece * (100_000 // len(piece)),
    )
    assert size >= 0


def test_blocks_that_do_not_change_stay(one_page):
    kept = one_page.evaluate(
        """async () => {
            const {render} = await import("./ui/markdown.js");
            const element = document.createElement("div");
            render(element, "one\\n\\ntwo");
            const [first, second] = element.children;
            render(element, "one\\n\\ntwo and more\\n\\n- three");
            const kept = [first === element.children[0], second === element.children[1]];
            render(element, "one");
            return [...kept, element.children.length];
        }"""
    )
    assert kept == [True, False, 1]


def test_hostile_names(open_page):
    """Names of models, tools, files and servers, and texts of errors, stay texts."""
    evil = "<img src=x onerror=\"document.title='run'\">"
    page = open_page()
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": evil}]}))
    page.reload()
    chat = Chat(page)
    call = {"index": 0, "id": evil, "function": {"name": evil, "arguments": evil}}
    chat.answer_with({"content": evil, "reasoning": evil, "tool_calls": [call]})
    chat.send(evil)
    page.get_by_label(f"Result of {evil}").fill(evil)
    assert page.get_by_label("Model").input_value() == evil
    page.unroute("**/v1/chat/completions")
    answer = {"error": {"message": evil}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=answer))
    page.get_by_role("button", name="Send results").click()
    assert chat.last.locator(".error").inner_text() == evil
    page.get_by_role("tab", name="Benchmark").click()
    files = [{"name": evil, "mimeType": "", "buffer": json.dumps({evil: 1}).encode()}] * 2
    files_of(page).set_input_files(files)
    page.get_by_role("row", name=evil).nth(1).wait_for()
    assert page.locator("main img, main script, main style").count() == 0
    assert page.title() == "Octavo"
