"""Small traces."""

import numpy as np

from lossyprobe.trace_file import FlowTrace, ProbeTrace, write_trace


def trace_file(tmp_path, *flows):
    """The path of a trace whose flows have these zeros and ones."""
    path = tmp_path / "trace.parquet"
    traces = [FlowTrace(lost=np.array(lost, bool)) for lost in flows]
    write_trace(path, ProbeTrace(flows=dict(enumerate(traces))))
    return path
