"""One workload, run by pflight, by raw loops and by other libraries: a file each.

A row of the benchmark is a function ``run(task, rounds, record)``: it trains a
:class:`~.workloads.Task` for some rounds, tells the :class:`~.workloads.Record` when each of them
ended and what was trained on, and returns the server's weights. ``python -m peers`` runs one row in
a process of its own, in an environment that may have nothing but NumPy and the library.
"""
