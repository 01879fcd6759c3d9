"""The course: labs released to students, and graded where their code can do no harm."""
