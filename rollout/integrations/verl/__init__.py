"""trueroll as a rollout engine of verl: `actor_rollout_ref.rollout.name=trueroll`. See docs/verl.md.

Users do not import this package: `import verl` finds `plugin` through an entry point.
"""
