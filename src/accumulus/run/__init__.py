"""The main job: a task, trained and recorded. Uses the library's public names only."""
