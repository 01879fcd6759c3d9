"""A chapter's exercises as its page prints them."""

import re
from types import ModuleType

import pytest

from icmllab.notebook import chapters


class Exercises:
    """The solutions of a chapter, each a piece of code that ends with its checker.

    Args:
        chapter: ``part/slug``.
        alias: the name that the page gives to the chapter's module.
        module: that module.
    """

    def __init__(self, chapter: str, alias: str, module: ModuleType):
        text = chapters.source_path(chapter).read_text(encoding="utf-8")
        self.alias, self.module = alias, module
        self.labels = re.findall(r"^```\{exercise\}\n:label: (\S+)", text, re.M)
        self.solutions = dict(
            re.findall(r"^````\{solution\} (\S+)\n.*?^```python\n(.*?)^```$", text, re.S | re.M)
        )

    def check_complete(self, count: int) -> None:
        """There are ``count`` exercises, and each has a solution."""
        assert len(self.labels) == count
        assert set(self.solutions) == set(self.labels)

    def run(self, label: str) -> None:
        """Run a solution and the checker that it ends with."""
        code = self.solutions[label]
        assert re.search(rf"^{self.alias}\.check_\w+\(\w+\)$", code, re.M)
        self.execute(label, code)

    def execute(self, label: str, code: str) -> None:
        """Run code as if it stood in the page."""
        exec(compile(code, label, "exec"), {self.alias: self.module})

    def refuse(self, label: str, right: str, wrong: str, message: str) -> None:
        """The solution with ``wrong`` in place of ``right`` fails, and its checker says why."""
        assert right in self.solutions[label]
        with pytest.raises(AssertionError, match=message):
            self.execute(label, self.solutions[label].replace(right, wrong))
