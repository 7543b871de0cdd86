"""Full garbage collections that are short and come often, in a process that has loaded a model.

Python puts a full collection off until the objects that are new to it are a quarter of all, and a loaded model and its
libraries are half a million: cycles would wait for hours, and the collection would stop the process for long.

Source: gc.freeze, https://docs.python.org/3/library/gc.html.
"""

import gc


def set_loaded_objects_aside() -> None:
    """Let no later collection look at what is alive now; for a process that keeps it until it ends."""
    gc.collect()
    gc.freeze()
    # Counts what is left, by which the next full collection is put off.
    gc.collect()
