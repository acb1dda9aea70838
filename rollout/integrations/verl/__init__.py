"""trueroll as a rollout of verl: `actor_rollout_ref.rollout.name=trueroll`. Needs the extra `verl`; docs/verl.md says how
it is used. Nothing here is called by users: `import verl` finds `plugin` by its entry point.
"""
