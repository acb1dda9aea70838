"""trueroll as a rollout engine of verl: `actor_rollout_ref.rollout.name=trueroll`. See docs/verl.md.

Users import nothing from here: `import verl` finds `plugin` through its entry point.
"""
