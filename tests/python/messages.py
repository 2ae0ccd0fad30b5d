"""The messages that the sources can raise, as templates: `…` stands for what varies.

    python tests/python/messages.py    lists them; those that docs/troubleshooting.md lacks first

Read from the sources, so that a new message is found without being registered anywhere.
"""

import ast
import itertools
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
VARIES = "…"
_SENTENCE = 20  # characters; a variable part that says less is not spelled out
# Expressions of messages that were made elsewhere.
_HANDED_ON = {"_ops.load_error", "load_error", "OTHER_VERSION", "str(error)", "main()", "__doc__"}


class Message(NamedTuple):
    where: str
    text: str


def all_messages():
    """Messages of the package, its build and the C++ library, each with its place."""
    python = [*ROOT.glob("flashattn_ext/**/*.py"), *ROOT.glob("build_support/*.py")]
    found = [message for path in python for message in _of_python(path)]
    cpp = [path for end in ("h", "cpp", "cu") for path in ROOT.glob(f"csrc/**/*.{end}")]
    found += [message for path in cpp for message in _of_cpp(path)]
    cmake = [ROOT / "CMakeLists.txt", *ROOT.glob("cmake/*.cmake")]
    return found + [message for path in cmake for message in _of_cmake(path)]


def own_words(text):
    """What a message says beside `expected` and `got`."""
    return re.sub(rf"\b(expected|got|error)\b|[\s,:{VARIES}]", "", text)


# Python


def _of_python(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for scope, node in _scopes(tree):
        expression = _raised(node)
        if expression is None:
            continue
        for text in _Reader(tree).texts(expression, scope):
            if text != VARIES or ast.unparse(expression) not in _HANDED_ON:
                yield Message(_place(path, node.lineno), text)


def _scopes(tree):
    """Each node with the innermost function that holds it, or the module."""

    def walk(node, scope):
        for child in ast.iter_child_nodes(node):
            yield scope, child
            yield from walk(child, child if isinstance(child, ast.FunctionDef) else scope)

    return walk(tree, tree)


def _raised(node):
    """The message of a raise or of an exit."""
    call = node.exc if isinstance(node, ast.Raise) else node
    if not isinstance(call, ast.Call) or not call.args:
        return None
    leaves = isinstance(node, ast.Raise) or ast.unparse(call.func) in ("sys.exit", "parser.error")
    return call.args[0] if leaves else None


class _Reader:
    """What expressions of a module can say."""

    def __init__(self, tree):
        self.tree = tree
        self.open = set()  # names that are being looked up

    def texts(self, expression, scope):
        match expression:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=parts):
                return _joined([self._part(part, scope) for part in parts])
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return _joined([self.texts(left, scope), self.texts(right, scope)])
            case ast.IfExp(body=body, orelse=other):
                return self.texts(body, scope) + self.texts(other, scope)
            case ast.Name(id=name):
                values = _assigned(name, scope) or _assigned(name, self.tree)
                return self._looked_up(name, [(value, scope) for value in values])
            case ast.Call(func=ast.Name(id=name)):
                return self._looked_up(name, _returned(name, self.tree))
        return [VARIES]

    def _part(self, part, scope):
        """Of an f-string: a variable is spelled out where it holds sentences."""
        if isinstance(part, ast.Constant):
            return [part.value]
        texts = self.texts(part.value, scope)
        return [text for text in texts if len(own_words(text)) > _SENTENCE] or [VARIES]

    def _looked_up(self, name, values):
        if name in self.open:
            return [VARIES]
        self.open.add(name)
        texts = [text for value, scope in values for text in self.texts(value, scope)]
        self.open.remove(name)
        return [text for text in dict.fromkeys(texts) if text] or [VARIES]


def _assigned(name, scope):
    return [
        node.value
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    ]


def _returned(name, tree):
    """What a function of the module returns, each with the function."""
    return [
        (node.value, function)
        for function in tree.body
        if isinstance(function, ast.FunctionDef) and function.name == name
        for node in ast.walk(function)
        if isinstance(node, ast.Return) and node.value is not None
    ]


def _joined(alternatives):
    joined = ("".join(parts) for parts in itertools.product(*alternatives))
    return list(dict.fromkeys(joined))


# C++. `refuse`, `reject` and the like build the sentence; their callers have the words.


_SENTENCES = re.compile(r"(?<!void )\b(throw [\w:]+|refuse|reject|check_range|check_cuda)\(")


def _of_cpp(path):
    code = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
    for call in _SENTENCES.finditer(code):
        arguments = _arguments(code, call.end())
        text = _sentence(call.group(1), [_cpp_text(argument) for argument in arguments])
        yield Message(_place(path, code[: call.start()].count("\n") + 1), text)


def _sentence(function, texts):
    match function:
        case "refuse":
            return texts[0] + ": " + "".join(texts[1:])
        case "reject":
            return f"{texts[0]}: expected {texts[2]}, got {VARIES}"
        case "check_range":
            return f"{texts[0]}: expected {VARIES} ... {VARIES}, got {VARIES}"
        case "check_cuda":
            function = f"{VARIES}: " if len(texts) == 3 else ""
            return f"{function}{texts[-1]}: {VARIES}"
    return "".join(texts)


def _arguments(code, begin):
    """The source text of each argument of a call, from behind its bracket on."""
    arguments, depth, start = [], 0, begin
    for piece in re.finditer(r'"(?:\\.|[^"\\])*"|[(){},]', code[begin:]):
        bracket = piece.group()
        if bracket in ("(", "{"):
            depth += 1
        elif bracket in (")", "}") and depth > 0:
            depth -= 1
        elif depth == 0 and bracket in (")", ","):
            arguments.append(code[start : begin + piece.start()])
            start = begin + piece.end()
            if bracket == ")":
                return arguments
    raise AssertionError(f"no end of the call at {code[begin : begin + 60]!r}")


def _cpp_text(argument):
    """Its literals, with `…` for what stands between them."""
    text = ""
    pieces = re.findall(r'"((?:\\.|[^"\\])*)"|([^"\s()+]+)', argument.replace("std::string(", "("))
    for literal, other in pieces:
        text += VARIES if other else literal.replace('\\"', '"')
    return re.sub(f"{VARIES}+", VARIES, text)


# CMake


def _of_cmake(path):
    code = path.read_text(encoding="utf-8")
    for error in re.finditer(r'message\(FATAL_ERROR((?:\s*"[^"]*")+)', code):
        text = "".join(re.findall(r'"([^"]*)"', error.group(1)))
        text = re.sub(r"\$(ENV)?\{\w+\}", VARIES, text)
        yield Message(_place(path, code[: error.start()].count("\n") + 1), text)


def _place(path, line):
    return f"{path.relative_to(ROOT)}:{line}"


# The page


def page_entries():
    """The messages of the page: what its tables have as code in their first column."""
    rows = re.findall(r"^\| (`.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [entry for row in rows for entry in re.findall(r"`([^`]+)`", row)]


def covers(entry, text):
    """Whether a message begins as the entry says; `…` on the page stands for anything."""
    pattern = ".*".join(re.escape(part) for part in entry.split(VARIES))
    return re.match(pattern, text, re.DOTALL) is not None


def missing(messages, entries):
    return [m for m in messages if not any(covers(entry, m.text) for entry in entries)]


if __name__ == "__main__":
    everything = [message for message in all_messages() if own_words(message.text)]
    lacking = missing(everything, page_entries()) if PAGE.is_file() else everything
    for message in sorted(everything, key=lambda m: m not in lacking):
        print("MISSING " if message in lacking else "        ", message.where, message.text)
