"""trueroll as a rollout of verl: `actor_rollout_ref.rollout.name=trueroll`. See docs/verl.md.

Users import nothing of this: `import verl` finds `plugin` by its entry point.
"""
