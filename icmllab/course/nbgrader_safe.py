"""nbgrader's own Autograde button and command, made as safe as ``make grade``.

``labs/nbgrader_config.py`` puts :class:`SandboxedExecute` where nbgrader would run students' code.
"""

import os

from nbgrader.preprocessors import NbGraderPreprocessor

from icmllab.course.assemble import assemble, template
from icmllab.course.execute import execute
from icmllab.course.paths import Course
from icmllab.course.sandbox import Limits, require


class SandboxedExecute(NbGraderPreprocessor):
    """Lay the submission into the lab's template; run it by :mod:`icmllab.course.execute`."""

    def preprocess(self, nb, resources):
        """Replace ``nb`` by the executed notebook; refuses without a sandbox."""
        from pathlib import Path

        sandboxed = os.environ.get("SANDBOX") != "off"
        if sandboxed:
            require()
        root = Path(resources["nbgrader"]["db_url"].removeprefix("sqlite:///").split("?")[0]).parent
        lab = template(Course(root).source(resources["nbgrader"]["assignment"]))
        done = execute(assemble(lab, nb), limits=Limits(), sandboxed=sandboxed)
        for note in done.notes:
            self.log.warning("%s", note)
        return done.notebook, resources
