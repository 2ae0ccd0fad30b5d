"""The Chinese pages have the headings, code, figures, tables, numbers and links of the English."""

from dataclasses import dataclass

import pytest
from pages import Page

pytest.importorskip("markdown_it")

from translations import TRANSLATIONS, first_difference  # noqa: E402

ENGLISH = """# Title

At 1024 tokens **`x`** takes 2 ms ([more](README.md)).

```python
x = 1  # one of 3
```

| a | b |
| - | - |
| 5 | 6 |

* ![A picture of 7](docs/figures/tiles.svg)
"""
CHINESE = """# 标题

**`x`** 耗时 2 ms，token 数为 1024（[详情](README.zh-CN.md)）。

```python
x = 1  # 3 个中的一个
```

| 甲 | 乙 |
| - | - |
| 5 | 6 |

* ![7 的图](docs/figures/tiles.svg)
"""


@dataclass(frozen=True)
class Text(Page):
    """A page that is in no file."""

    text: str = ""


@pytest.mark.parametrize("english, chinese", TRANSLATIONS.items())
def test_translation_follows_its_original(english, chinese):
    difference = first_difference(Page(english), Page(chinese))
    assert difference is None, difference


def test_other_words_and_their_order_are_no_difference():
    assert first_difference(Text("a.md", ENGLISH), Text("b.md", CHINESE)) is None


@pytest.mark.parametrize(
    "old, new, line",
    [
        ("# 标题", "## 标题", 1),
        ("1024", "1025", 3),
        ("`x`", "`y`", 3),
        ("** ", "**", 3),
        ("README.zh-CN.md", "CHANGELOG.md", 3),
        ("```python", "```sh", 5),
        ("x = 1", "x = 2", 5),
        ("# 3", "# 4", 5),
        ("| 5 | 6 |\n", "", 9),
        ("5 | 6", "6 | 5", 11),
        ("tiles.svg", "pages.svg", 13),
        ("7 ", "8 ", 13),
        ("* !", "!", 13),
    ],
)
def test_a_difference_is_named_with_its_place(old, new, line):
    assert CHINESE.count(old) == 1
    difference = first_difference(Text("a.md", ENGLISH), Text("b.md", CHINESE.replace(old, new)))
    assert f"b.md:{line}: " in difference
