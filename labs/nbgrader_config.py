"""Settings of the course for nbgrader: its commands, its formgrader, its Validate button."""

c = get_config()  # noqa: F821

c.CourseDirectory.course_id = "icmllab"
# the text halves hold solutions
c.CourseDirectory.ignore = [".ipynb_checkpoints", "*.pyc", "__pycache__", "*.md", "*.previous-*"]

# nbgrader would run students' code with the teacher's rights: run it in the sandbox instead
c.Autograde.autograde_preprocessors = [
    "icmllab.course.nbgrader_safe.SandboxedExecute",
    "nbgrader.preprocessors.LimitOutput",
    "nbgrader.preprocessors.SaveAutoGrades",
    "nbgrader.preprocessors.AssignLatePenalties",
    "nbgrader.preprocessors.CheckCellMetadata",
]
c.Autograde.sanitize_preprocessors = ["nbgrader.preprocessors.ClearOutput"]
