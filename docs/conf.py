from kvps import __version__

project = "kvps"
copyright = "the kvps contributors"
release = version = __version__

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"kvps {release}"
html_show_sphinx = False
