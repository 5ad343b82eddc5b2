"""Lowering: turns a stage's joint graph into programs.

The input is a joint graph and the fraction of activations to save. The output is `Program`s: lists of
operator calls, memory offsets and gradient accumulations that C++ runs. What files are for::

    checkpoint  split  ladder                             what is saved
    operator_examples  operator_times  operator_memory    what an operator costs, measured or estimated
    lower  operators  values  alias  gradients  launch    the steps of a program
    memory                                                where its values are
    program  program_template  steps                      the result, for one size or with formulas
    work                                                  bytes and launches, for reports
"""
