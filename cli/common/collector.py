"""Python's collector of cyclic garbage, which rests while a command starts.

Importing torch and transformers and loading a model make half a million objects that stay. Looking for garbage among
them, again and again, takes a sixth of the time until the first answer.
"""

import gc

_RESTING = 1_000_000  # new objects before it looks for garbage
_USUAL = gc.get_threshold()


def rest_collector() -> None:
    """Let it look for garbage seldom, until `resume_collector`."""
    gc.set_threshold(_RESTING, *_USUAL[1:])


def resume_collector() -> None:
    """Let it work as usual from here on, if it rests; what there is already it no longer looks at."""
    if gc.get_threshold()[0] == _RESTING:
        gc.freeze()
        gc.set_threshold(*_USUAL)
