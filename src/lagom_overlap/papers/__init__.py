"""What shows the papers' experiments: the reproduction, their workloads and models, the laboratory threads.

Found by entry points, and imported by nothing else of the package.
"""
