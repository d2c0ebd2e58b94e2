"""The verifier: runs the target model and decides which drafts are accepted.

Start at `Engine.step` in `engine/engine.py`. `server.py` starts the service, `build.py` puts its
parts together, `follower.py` is the process of another rank. The rooms, from the outside in:

    service/          gRPC: sessions, conversion and validation of messages, liveness
    engine/           the engine thread: commands in, steps, events out
    scheduling/       which sequences run, with how many tokens, in which K/V blocks
    drafters/         what each drafter was sent, and the stream to it
    drafts/           a sequence's latest hint, how many drafts to verify, whether to wait for one
    sampling/         from logits to tokens and logprobs; acceptance of drafts
    structured/       output that follows a grammar
    batch/            a step as flat arrays, and the protocol of a model that runs it
    model/            who computes a checkpoint, in how much memory
    transformers_model/  a model as transformers defines it, loaded and run over the paged K/V cache
    parity/           the checks at load that a model is computed as transformers computes it
    cpu/              the own decoder for CPUs: packed weights, kernels, threads
    gpu/              the decoder for GPUs: loads weights to the device, runs and samples there
    attention/        the paged K/V cache of the decoder for GPUs and of transformers' models, and
                      attention over it without kernels of our own
    checkpoint/       what is in a checkpoint's folder, as the own decoders read it
    tensor_parallel/  one model over several processes

`rejection_sampler.py` and `logits_processing.py` are import paths for code outside this repository.
"""
