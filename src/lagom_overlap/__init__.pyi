from lagom_overlap.runtime.online import OnlineTuner as OnlineTuner
from lagom_overlap.runtime.options import OnlineOptions as OnlineOptions

__all__ = ["OnlineOptions", "OnlineTuner", "__version__"]

__version__: str
