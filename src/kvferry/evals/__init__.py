"""Evaluations of any endpoint that speaks OpenAI's API: does it answer, and is it right?

GSM8K is here: grade-school problems whose answer is one number. Reading, prompting, scoring and
summing up are pure; only ``run`` talks to a server. The data set is the user's own file.
"""
