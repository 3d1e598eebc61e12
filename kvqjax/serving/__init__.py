"""Serving a model: requests share a running batch (`engine`), and the OpenAI protocol over HTTP
(`app`)."""
