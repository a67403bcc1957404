"""What a measured timeline says: exposure, contention, waiting, advice."""
