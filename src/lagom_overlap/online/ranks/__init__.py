"""Ranks that agree: messages, the tree, leader and members, what is in force."""
