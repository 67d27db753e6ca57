"""``kvferry plan``: who sends what to whom for a pair of layouts."""
