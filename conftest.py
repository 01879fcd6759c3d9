"""Settings that every test and every notebook re-run shares."""

import os

# Notebooks re-run by nbval show what the stored ones show: pre-rendered explorables, no bars.
os.environ.setdefault("ICMLLAB_STATIC", "1")
os.environ.setdefault("PYTHONHASHSEED", "0")
