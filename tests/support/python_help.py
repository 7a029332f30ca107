"""A real document: Python 3.11.7's help on its language, 465,126 characters of technical prose.

The text is stored here, under Python's license, because each version of Python has another text, with other figures.
"""

import json
from pathlib import Path

TOPICS: dict[str, str] = json.loads((Path(__file__).parents[1] / "data" / "python-topics.json").read_text("utf-8"))
DOCUMENT = "\n\n".join(TOPICS.values())
BY_NAME = "\n\n".join(TOPICS[name] for name in sorted(TOPICS))
"""The document with its topics in the order of their names."""
