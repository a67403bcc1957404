"""What verbs return: typed, encodable."""
