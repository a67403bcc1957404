import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # random_graphs, which makes graphs and judges them by enumeration
