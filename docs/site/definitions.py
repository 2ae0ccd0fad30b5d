"""Where a file defines a symbol: links to code are checked and, in the site, aimed with it."""

import re


def definition(lines, symbol):
    """The number of the line of C++ or Python that defines a symbol, or None."""
    word = re.escape(symbol)
    type_ = rf"(\b(def|class|struct|enum class|concept|set\()|#define)\s*{word}\b"
    function = rf"^\s*(?!return\b|throw\b)[\w:<>,*&\[\] ]*[\w>&*\]] {word}\("
    kernel = rf"(^\s*|\) ){word}\(__grid_constant__"
    value = rf"^[\w: ]*\b{word}(\[\])? = "
    for pattern in (type_, function, kernel, value):
        for number, line in enumerate(lines, 1):
            if re.search(pattern, re.sub(r"//.*", "", line)):
                return number
    return None
