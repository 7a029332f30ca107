"""Peak memory of a command's process."""

PEAK = """
import re
def peak():
    # Not getrusage, whose peak includes that of the process that started this one.
    status = open("/proc/self/status").read()
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024
"""
"""Python source of a function `peak()`, which returns the peak resident memory of its process in bytes."""
