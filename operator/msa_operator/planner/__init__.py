"""The planner: pure functions from a model, a pattern and machines to an explained plan."""
