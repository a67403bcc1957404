"""Other people's measurements of computation next to communication: rows, and the model's predictions for them."""
