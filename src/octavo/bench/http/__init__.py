"""Loads on real servers, of any engine with OpenAI's API. Uses the public HTTP API and nothing of octavo's inside."""
