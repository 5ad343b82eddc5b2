"""Counts lines of code without blank lines, comments and docstrings.

`python .ci/count_lines.py [FOLDER]` prints a table for a tree, by default this one.
"""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

# What a row of the table counts, by its name. The product leaves out tests, benchmarks and examples.
ROWS = {
    "kernels and fuse": ("kernels", "gpipe_fast/fuse"),
    "product": ("kernels", "gpipe_fast", "csrc"),
}
LANGUAGES = {
    "Python": (".py", ".pyi"),
    "C++": (".h", ".cpp"),
    "CUDA": (".cu", ".cuh"),
}
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
# A string is matched so that no comment begins in it.
_COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def python_lines(text):
    """Returns the number of lines of a Python source that have code."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and ast.get_docstring(node, clean=False) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def cpp_lines(text):
    """Returns the number of lines of a C++ or CUDA source that have code."""

    def without_comment(match):
        found = match[0]
        return found if found.startswith('"') else "\n" * found.count("\n")

    return sum(bool(line.strip()) for line in _COMMENT_OR_STRING.sub(without_comment, text).splitlines())


def count(root, folders):
    """Returns the lines of code in folders of a tree, by language. Links to folders are not followed."""
    found = dict.fromkeys(LANGUAGES, 0)
    for folder in folders:
        for path in (root / folder).rglob("*"):
            for language, suffixes in LANGUAGES.items():
                if path.suffix in suffixes:
                    lines = python_lines if language == "Python" else cpp_lines
                    found[language] += lines(path.read_text())
    return found


def main(root):
    """Prints the table."""
    print(f"{'':18}{''.join(f'{language:>10}' for language in LANGUAGES)}")
    for name, folders in ROWS.items():
        print(f"{name:18}{''.join(f'{lines:10}' for lines in count(root, folders).values())}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
