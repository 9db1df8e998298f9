"""Spaces between the texts of windows."""

import pytest

from octavo.speech.joins import join


@pytest.mark.parametrize(
    ("before", "text", "added"),
    [
        ("", " Hello ", "Hello"),
        ("Hello.", "How are you?", " How are you?"),
        ("Hello.", " How", " How"),
        ("Hello.", "  ", ""),
        ("今天天气", "很好。", "很好。"),
        ("你好。", "Hello", "Hello"),
        ("他说：“你好”", "我说", "我说"),  # noqa: RUF001
        ("He said “hello”", "and left", " and left"),
        ("昨日は", "カメラを", "カメラを"),
        ("カメラー", "です", "です"),
        ("在", "2026年", "2026年"),
        ("2026", "年", "年"),
        ("50%", "的人", "的人"),
        ("我用", "Python", " Python"),
        ("Python", "很好", " 很好"),
        ("Hello", "，世界", "，世界"),  # noqa: RUF001
        ("你好,", "世界", " 世界"),
        ("你好", "!", "!"),
        ("価格は", "￥500", "￥500"),
        ("今天😀", "好", " 好"),
        ("Hello", ", world", ", world"),
        ("Hello", "...and", " ...and"),
        ("It is", ".5", " .5"),
        ("2026년", "3월", " 3월"),
        ("안녕하세요.", "반갑습니다", " 반갑습니다"),
        ("สวัสดี", "ครับ", "ครับ"),
        ("ที่", "เมือง", "เมือง"),
        ("ສະບາຍ", "ດີ", "ດີ"),
        ("မင်္ဂ", "လာပါ", "လာပါ"),
        ("មាន", "សុខ", "សុខ"),
        ("ใช้", "Python", " Python"),
        ("…", "…", " …"),
        ("नमस्ते", "दुनिया", " दुनिया"),
    ],
)
def test_joins(before, text, added):
    assert join(before, text) == added
