"""Structured output: what a text must match, and the machinery that makes every token follow it.

spec          what a request asks for, checked for shape (no xgrammar needed)
checker       HTTP process: is this grammar valid and cheap enough? 400 before anything queues
workshop      process that tries grammars out, each in a child that may be killed
compiler      the calls into xgrammar
failed        accepted grammars that turned out to be too slow
loader        scheduler process: compiles accepted grammars beside the running batch
constraint    where one sequence stands in its grammar; token masks of a batch
"""
