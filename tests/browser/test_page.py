"""Tabs, themes and keys of the page."""


def test_tabs(open_page):
    page = open_page()
    for name in ("Engine", "Explain", "Benchmark", "Chat"):
        page.get_by_role("tab", name=name).click()
        assert page.get_by_role("tabpanel", name=name).is_visible()
        assert page.get_by_role("tabpanel").count() == 1
