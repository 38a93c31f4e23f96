"""How the site is built: python -m sphinx -W -n --keep-going -b html docs build/site

Pages are Markdown (MyST). The flag reference and the API reference are made from the code while the site is built:
flag_reference.py and docstrings.py say how.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import docstrings  # noqa: E402
import flag_reference  # noqa: E402

import tfdist  # noqa: E402

project = "tfdist"
author = "The tfdist authors"
copyright = author  # noqa: A001 - Sphinx' name
version = release = tfdist.__version__
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"tfdist {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
highlight_language = "bash"


def setup(app):
    flag_reference.setup(app)
    docstrings.setup(app)
