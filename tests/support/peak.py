"""How much memory a command's process held at most."""

PEAK = """
import re
def peak():
    # Not getrusage: what it says begins with the peak of the process that started this one.
    status = open("/proc/self/status").read()
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024
"""
"""Python that defines `peak()`, the peak resident memory in bytes of the process that runs it."""
