"""The path by which configurations written by 0.1.0 name `OutOfMemoryReport`."""

from lightning_memfit.fitting.recovery.oom_report import OutOfMemoryReport as OutOfMemoryReport
