"""A real document: Python 3.11.7's help on its language, 465,126 characters of technical prose.

Kept here, under Python's license, for every version of Python has another text, on which figures differ.
"""

import json
from pathlib import Path

TOPICS: dict[str, str] = json.loads((Path(__file__).parents[1] / "data" / "python-topics.json").read_text("utf-8"))
DOCUMENT = "\n\n".join(TOPICS.values())
BY_NAME = "\n\n".join(TOPICS[name] for name in sorted(TOPICS))
"""The same, the topics in the order of their names."""
