"""``kvferry eval``: scores of any endpoint that speaks OpenAI's API."""
