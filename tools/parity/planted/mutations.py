"""The defects that are planted, one at a time, to see whether parity finds them and names their place.

The fixes of docs/colossalai.md that concern numbers are undone, one by one. Those that are not here do not: how the
groups, the store and the device are made, waits for the device, the functions of `torch.cuda`, torch 1.12's shape
functions, the check that imports a missing module, and AMP_TYPE.TORCH's wish for torch 1. Nor is upstream's automatic
linear layer for 1D: in the order in which this model builds its layers, it chooses the right ones.

`named` was written before the first run, and corrected after it where the defect has to show first elsewhere: the head
begins with zeros, so that in the first step no other gradient than its own differs from 0 and all losses are equal; and
weights and moments come in the order of their names. Four defects were left out, since they change nothing: 2.5D's
unused pieces have no gradient and cannot count in a norm; a bucket that is sent after each backward pass adds up to the
same; LAMB's count of steps matters with its bias correction only; and two interleaved stages swap messages from four
micro-batches on, not with two.
"""

from dataclasses import dataclass

FP64, OWN = "fp64", "own"  # parity as it is, and with `--own-precision`


@dataclass(frozen=True)
class Mutation:
    """A defect.

    Attributes:
        name: of it.
        defect: what is wrong, in a sentence.
        path: the file that has it.
        old, new: the text that is replaced, which the file has exactly once, and what by.
        layout: the one that should show it.
        named: a regular expression of what parity is to name first: "step S, KIND LAYER".
        values: of the config, as for `--set`, besides those that all mutations have.
        precisions: in which it is planted; the others do not run the text that is replaced, or it is right there.
        why: if it is not named rightly in each of them, the reason; else empty.
    """

    name: str
    defect: str
    path: str
    old: str
    new: str
    layout: str
    named: str
    values: tuple[str, ...] = ()
    precisions: tuple[str, ...] = (FP64, OWN)
    why: str = ""


VIT, TRAIN = (f"vit_cifar10_hybrid/{name}.py" for name in ("vit", "train_hybrid"))
CIFAR10 = "vit_cifar10_hybrid/cifar10.py"
SHARDING = "colossal_vit/parallel/sharding.py"
BATCHES, SAMPLERS = (f"colossal_vit/data/{name}.py" for name in ("batches", "samplers"))
AMP, ASSEMBLY, EMA = (f"colossal_vit/engine/{name}.py" for name in ("amp_optimizer", "assembly", "ema"))
ENGINE, LAMB, LOOP = (f"colossal_vit/engine/{name}.py" for name in ("engine", "lamb", "loop"))
OPTIMIZER, PRECISION, REDUCTION = (
    f"colossal_vit/engine/{name}.py" for name in ("optimizers", "precision", "reduction")
)
FULLY_SHARDED, MUON, SCHEDULES, ZERO = (
    f"colossal_vit/engine/{name}.py" for name in ("fully_sharded", "muon", "schedules", "zero")
)
DROPOUT, KERNEL, PHILOX = (f"colossal_vit/rng/{name}.py" for name in ("dropout", "cpu_kernel", "philox"))
NORMS, PATCHES = (f"colossal_vit/compat/{name}.py" for name in ("norms", "patches"))
TENSORS, FULL_TENSORS, CHECKPOINTER = (
    f"colossal_vit/checkpoint/{name}.py" for name in ("tensors", "full_tensors", "checkpointer")
)
METRICS = "colossal_vit/hooks/metrics.py"

# Values of a config.
FOUR_BLOCKS = ("DEPTH=4",)
LAMB_OPTIMIZER = ("OPTIMIZER='lamb'", "LEARNING_RATE=1.8e-2", "WEIGHT_DECAY=0.1")
MUON_OPTIMIZER = ("OPTIMIZER='muon'",)
# With SGD in half precision: AdamW makes full steps of gradients that are nearly 0, of whose rounding the sign may be
# all that is left, and without any defect parity with `--own-precision` then finds other weights.
SGD = ("OPTIMIZER='sgd'", "LEARNING_RATE=0.1")
FP16 = ("fp16=dict(mode=AMP_TYPE.NAIVE, dtype='fp16')", *SGD)
FP16_SMALL_SCALE = ("fp16=dict(mode=AMP_TYPE.NAIVE, dtype='fp16', initial_scale=256.0)", *SGD)
BF16 = ("fp16=dict(mode=AMP_TYPE.NAIVE, dtype='bf16')", *SGD)
BF16_AUTOCAST = ("fp16=dict(mode=AMP_TYPE.TORCH, dtype='bf16')", *SGD)

EVERYWHERE = "one process and every layout do the same: "
FAILS = "it fails, and a line names the rank, the exception and its place"

MODEL = [
    Mutation(
        "mask of attention's output split",
        "Under 1D each rank drops other elements of attention's output, which all of them have whole.",
        VIT,
        "self.proj_drop = Dropout(config.DROP_RATE, output_part(self.proj))",
        "self.proj_drop = Dropout(config.DROP_RATE, output_part(self.qkv))",
        "1D 2",
        r"step 1, output blocks\.0\.attn\.proj_drop",
    ),
    Mutation(
        "mask of hidden activations not split",
        "Under 1D each rank drops its part of the MLP's hidden activations as if it were the first one.",
        VIT,
        "self.drop1 = Dropout(config.DROP_RATE, output_part(self.fc1), gelu=True)",
        "self.drop1 = Dropout(config.DROP_RATE, gelu=True)",
        "1D 2",
        r"step 1, output blocks\.0\.mlp\.drop1",
    ),
    Mutation(
        "heads cut across",
        "A rank takes its rows of query, key and value for three blocks, as in timm, and not for heads side by side.",
        VIT,
        "qkv.unflatten(-1, (-1, 3, self.head_size)).unbind(-2)",
        "qkv.unflatten(-1, (3, -1, self.head_size)).unbind(-3)",
        "1D 2",
        r"step 1, output blocks\.0\.attn\.proj",
    ),
    Mutation(
        "drop path counted in the stage",
        "The rate of drop path grows with a block's number in its pipeline stage, not in the model.",
        VIT,
        "{str(n): Block(layers, config, n) for n in blocks}",
        "{str(n): Block(layers, config, n - blocks.start) for n in blocks}",
        "PP 2",
        r"step 1, output blocks\.1\.(drop_path1|norm2)",  # a drop path's own output, or what it goes into
    ),
    Mutation(
        "dropout seeded by rank",
        "The seed of dropout has the rank in it.",
        VIT,
        "name_layers(self, config.SEED)",
        "name_layers(self, config.SEED + gpc.get_global_rank())",
        "1D 2",
        r"step 1, output pos_drop",
    ),
    Mutation(
        "initial weights seeded by rank",
        "The seed of the initial weights has the rank in it.",
        VIT,
        "with cpu_seed(config.SEED):",
        "with cpu_seed(config.SEED + gpc.get_global_rank()):",
        "1D 2",
        r"step 1, output patch_embed",
    ),
    Mutation(
        "chunks of a stage side by side",
        "In an interleaved pipeline each stage has consecutive parts of the model.",
        VIT,
        "partition_blocks(config, layout.pipeline * num_chunks)[stage :: layout.pipeline]",
        "partition_blocks(config, layout.pipeline * num_chunks)[stage * num_chunks : (stage + 1) * num_chunks]",
        "PP 2 × chunks 2",
        r"step 1, output blocks\.1\..*",
        FOUR_BLOCKS,
    ),
    Mutation(
        "another token for the head",
        "Where there are several stages, the head reads the first patch, not the class token.",
        VIT,
        "x = self.norm(x)[:, 0]",
        "x = self.norm(x)[:, 0 if self.patch_embed is not None else 1]",
        "PP 2",
        r"step 1, (output head|gradient of head\.weight)",
    ),
    Mutation(
        "recomputed blocks without samples",
        "With CHECKPOINT a block is recomputed with the samples of another forward pass.",
        VIT,
        "return checkpoint(self._forward, x, samples,",
        "return checkpoint(self._forward, x, None,",
        "PP 2",
        r"step 1, gradient at blocks\.[01]\..*",
        ("CHECKPOINT=True",),
        why=FAILS,
    ),
]

SHARDS = [
    Mutation(
        "shards in reverse order",
        "Rank r cuts the last but r-th piece from a full parameter; gathering has the right order.",
        SHARDING,
        "[gpc.get_local_rank(mode)]\n        return piece",
        "[-1 - gpc.get_local_rank(mode)]\n        return piece",
        "1D 2",
        r"step 1, output blocks\.0\.attn\.qkv",
    ),
    Mutation(
        "rows for columns in 2D",
        "2D cuts a matrix the other way round than its layers multiply, and gathers it so too.",
        SHARDING,
        "matrix = dict(transposed=True, splits=((1, row), (0, column)))",
        "matrix = dict(transposed=True, splits=((0, row), (1, column)))",
        "2D 4",
        r"step 1, output blocks\.0\.attn\.qkv",
    ),
    Mutation(
        "order of the cuts in 3D",
        "3D cuts a matrix along the groups of its input, its output and its weight in another order.",
        SHARDING,
        "modes = (layer.output_parallel_mode, layer.input_parallel_mode, layer.weight_parallel_mode)",
        "modes = (layer.weight_parallel_mode, layer.input_parallel_mode, layer.output_parallel_mode)",
        "3D 8",
        r"step 1, output blocks\.0\.attn\.qkv",
    ),
    Mutation(
        "pieces gathered in the order of cutting",
        "Gathering undoes the cuts in the order in which they were made, not in reverse.",
        SHARDING,
        "for dim, mode in reversed(self.splits):",
        "for dim, mode in self.splits:",
        "2D 4",
        r"step 1, gradient of head\.weight",
    ),
    Mutation(
        "owner of a norm's weight in 2.5D",
        "The gradients of norms and biases are taken from the second row of ranks, where they are not used.",
        SHARDING,
        "vector = dict(**_along(0, row), owner=(column, 0))",
        "vector = dict(**_along(0, row), owner=(column, 1))",
        "2.5D 8",
        r"step 2, gradient of blocks\.0\.norm1\.weight",
    ),
    Mutation(
        "owner of the head in 3D",
        "The gradient of the head is taken from the first rank of a group for each of its pieces.",
        SHARDING,
        "diagonal = (layer.input_parallel_mode, gpc.get_local_rank(layer.output_parallel_mode))",
        "diagonal = (layer.input_parallel_mode, 0)",
        "3D 8",
        r"step 1, gradient of head\.weight",
    ),
    Mutation(
        "query, key and value not put head by head",
        "The fused projection is cut as timm stores it, while attention expects query, key and value of each head.",
        SHARDING,
        "piece = piece.unflatten(0, (3, self.num_heads, -1)).transpose(0, 1).flatten(0, 2)",
        "piece = piece.clone()",
        "1D 2",
        r"step 3, output blocks\.0\.attn\.qkv",
    ),
    Mutation(
        "norm of local gradients",
        "The norm by which gradients are clipped is that of each rank's own ones.",
        SHARDING,
        "    if gpc.is_initialized(group) and gpc.get_world_size(group) > 1:\n        dist.all_reduce(total,",
        "    if gpc.is_initialized(group) and gpc.get_world_size(group) < 1:\n        dist.all_reduce(total,",
        "PP 2",
        r"step 2, grad_norm",
    ),
    Mutation(
        "norm counts replicas",
        "A gradient that several tensor-parallel ranks have whole counts once for each of them in the norm.",
        SHARDING,
        "return gpc.tensor_parallel_size // (shard.num_holders if shard else 1)",
        "return 1",
        "1D 2",
        r"step 1, grad_norm",
    ),
    Mutation(
        "norm summed without squares",
        "The norm of all gradients is made of the norms of the pieces, not of their squares.",
        SHARDING,
        "total += torch.stack(norms).double().square().sum() / replicas",
        "total += torch.stack(norms).double().sum() / replicas",
        "1D 2",
        r"step 1, grad_norm",
    ),
    Mutation(
        "loss of a part of the batch",
        "Binary cross entropy is the mean over this rank's part of the batch only.",
        SHARDING,
        "return reduce(loss, True) if reduce else loss",
        "return loss",
        "2D 4",
        r"step 1, gradient at head",
        ("bce.threshold=0.5",),
    ),
    Mutation(
        "places of 3D's activations",
        "In 3D a rank takes another rank's samples for its own, in dropout and in what it records.",
        SHARDING,
        "columns, rows = [layer.input_parallel_mode], [layer.weight_parallel_mode, layer.output_parallel_mode]",
        "columns, rows = [layer.input_parallel_mode], [layer.output_parallel_mode, layer.weight_parallel_mode]",
        "3D 8",
        r"step 1, output blocks\.0\.attn\.qkv",
    ),
]

REDUCTIONS = [
    Mutation(
        "biases not reduced",
        "The gradients of vectors are in no bucket, so that each replica keeps its own.",
        REDUCTION,
        "reversed([p for p in parameters if p.requires_grad])",
        "reversed([p for p in parameters if p.requires_grad and p.ndim > 1])",
        "DP 2 × PP 2",
        r"step 1, gradient of head\.bias",
    ),
    Mutation(
        "gradients reduced twice",
        "A bucket is summed over the replicas twice.",
        REDUCTION,
        "            self._reduction = dist.all_reduce(",
        "            dist.all_reduce(self._sum, group=self.group)\n            self._reduction = dist.all_reduce(",
        "DP 2 × PP 2",
        r"step 1, gradient of head\.(weight|bias)",
    ),
    Mutation(
        "sum for mean over replicas",
        "Gradients are summed over the replicas, not averaged.",
        REDUCTION,
        ".mul_(1 / self.group.size())",
        "",
        "DP 2 × PP 2",
        r"step 1, gradient of head\.(weight|bias)",
    ),
    Mutation(
        "stale bucket",
        "A bucket keeps the averages of the last step, and adds the next ones.",
        REDUCTION,
        "            parameter.grad = average\n        self._averages = {}",
        "            parameter.grad = average",
        "DP 2 × PP 2",
        r"step 2, gradient of head\.(weight|bias)",
    ),
    Mutation(
        "micro-batch that overwrites",
        "The average of a later backward pass takes the place of the earlier ones.",
        REDUCTION,
        "self._averages[parameter].add_(average)",
        "self._averages[parameter] = average",
        "DP 2 × PP 2 × zero 2",
        r"step 1, gradient of head\.(weight|bias)",
    ),
    Mutation(
        "bucket of one parameter",
        "Only the first parameter of each bucket is averaged.",
        REDUCTION,
        "self._reduction = dist.all_reduce(self._sum, group=self.group, async_op=True)",
        "self._reduction = dist.all_reduce(self._sum[:10], group=self.group, async_op=True)",
        "DP 2 × PP 2",
        r"step 1, gradient of head\.(weight|bias)",
    ),
    Mutation(
        "owner without the others' gradients",
        "With split optimizer state a parameter's owner does not add what other ranks send.",
        REDUCTION,
        "        for part in self.received:\n            self._tensor.add_(part)",
        "        for part in self.received:\n            pass",
        "DP 2 × zero 1",
        r"step 1, gradient of head\.(weight|bias)",
    ),
    Mutation(
        "small weights not received",
        "With split optimizer state, small weights of other owners stay as they were.",
        ZERO,
        "if self.small and not self.is_owner:",
        "if self.small and self.is_owner:",
        "DP 2 × zero 1",
        r"step 2, output (patch_embed|blocks\.0\.norm1)",
    ),
    Mutation(
        "weights not sent",
        "With split optimizer state, owners keep new weights to themselves.",
        ZERO,
        "        self._unsent = deque(reversed(self.buckets))",
        "        self._unsent = deque()",
        "DP 2 × zero 1",
        r"step 2, output (patch_embed|blocks\.0\.norm1)",
    ),
    Mutation(
        "norm of the owner's gradients",
        "With split optimizer state, gradients are clipped by the norm of those that a rank owns.",
        ASSEMBLY,
        "        optimizer.norm_group = ParallelMode.GLOBAL\n",
        "        pass\n",
        "DP 2 × zero 1",
        r"step 1, grad_norm",
    ),
    Mutation(
        "norm of the pieces' gradients",
        "With split weights, gradients are clipped by the norm of a rank's pieces.",
        ASSEMBLY,
        "    if stage:\n        optimizer.norm_group",
        "    if zero:\n        optimizer.norm_group",
        "DP 2 × zero 3",
        r"step 1, grad_norm",
    ),
    Mutation(
        "gradients of pieces summed",
        "With split weights, gradients are summed over the ranks, not averaged.",
        FULLY_SHARDED,
        "parameter.grad.to_local(), None",
        "parameter.grad.to_local() * gpc.get_world_size(ParallelMode.DATA), None",
        "DP 2 × zero 3",
        r"step 1, gradient of head\.(weight|bias)",
    ),
    Mutation(
        "trust ratio of pieces",
        "With split weights, LAMB's trust ratios are made of the norms of each rank's pieces.",
        FULLY_SHARDED,
        "(ParallelMode.TENSOR, ParallelMode.DATA)",
        "(ParallelMode.TENSOR,)",
        "DP 2 × zero 3",
        r"step 2, weight blocks\.0\.attn\.proj\.weight",
        LAMB_OPTIMIZER,
        why="in fp32 a weight's difference of 5e-5 is within what rounding is allowed; what follows is not",
    ),
    Mutation(
        "first step not reduced",
        "DistributedDataParallel reduces from the second step on only.",
        ENGINE,
        "        self._micro_step = 0\n        self._reduce_in_backward(accumulation == 1)",
        "        self._micro_step = 0\n        self._reduce_in_backward(False)",
        "DP 2",
        r"step 1, gradient of head\.(weight|bias)",
    ),
    Mutation(
        "accumulation without reduction",
        "With accumulation DistributedDataParallel never reduces.",
        ENGINE,
        "self._reduce_in_backward(self._micro_step == self.accumulation - 1)",
        "self._reduce_in_backward(self._micro_step == self.accumulation)",
        "DP 2 × accumulation 2",
        r"step 1, gradient of head\.(weight|bias)",
    ),
    Mutation(
        "average over replicas twice",
        "The loss is divided by the number of replicas, over which gradients are averaged anyway.",
        ENGINE,
        "super().backward(loss / self.accumulation)",
        "super().backward(loss / self.accumulation / gpc.get_world_size(ParallelMode.DATA))",
        "DP 2",
        r"step 1, gradient at head",
    ),
]

STEPS = [
    Mutation(
        "accumulated loss not divided",
        "The loss of a micro-batch is not divided by how many there are.",
        ENGINE,
        "super().backward(loss / self.accumulation)",
        "super().backward(loss)",
        "accumulation 2",
        r"step 1, gradient at head",
    ),
    Mutation(
        "gradients set to zero between micro-batches",
        "Each micro-batch begins with new gradients, so that only the last one counts.",
        ENGINE,
        "        if self._micro_step == 0:\n            super().zero_grad()",
        "        super().zero_grad()",
        "accumulation 2",
        r"step 1, gradient of head\.(weight|bias)",
    ),
    Mutation(
        "backward passes counted",
        "Fix undone: accumulation counts backward passes, of which a pipeline makes several for a batch.",
        ENGINE,
        "self._micro_step = (self._micro_step + 1) % self.accumulation",
        "self._micro_step = (self._micro_step + getattr(self.schedule, 'num_microbatches', 1)) % self.accumulation",
        "PP 2 × accumulation 2",
        r"step 1, gradient of head\.(weight|bias)",
        why="the step then ends after half of its images, and that the others are missing comes before any gradient",
    ),
    Mutation(
        "clipping to nothing",
        "Fix undone: without clip_grad_norm gradients are clipped to 0.",
        AMP,
        "factor = torch.full_like(self.grad_norm, 1.0 / scale)\n        if max_norm > 0:",
        "factor, scale = torch.full_like(self.grad_norm, 1.0 / scale), 0.0\n        if max_norm >= 0:",
        "DP 2",
        r"step 1, weight cls_token",
        ("clip_grad_norm=0.0",),
        why=EVERYWHERE + "nothing is trained in either, and weights still decay. That training makes the loss smaller "
        "is for other tests",
    ),
    Mutation(
        "clipping of scaled gradients",
        "Fix undone: gradients are clipped before they are unscaled.",
        AMP,
        "self.grad_norm = global_norm(grads, parameters, self.norm_group) / scale",
        "self.grad_norm = global_norm(grads, parameters, self.norm_group)",
        "DP 2 × PP 2",
        r"step 1, weight cls_token",
        FP16,
        (OWN,),
        why=EVERYWHERE + "the gradient that is clipped has the same scale in each",
    ),
    Mutation(
        "unscaling by the next scale",
        "Fix undone: the loss scale is raised before gradients are unscaled by it.",
        AMP,
        "grads, scale = [p.grad for p in parameters], self.loss_scale or 1.0",
        "grads, scale = [p.grad for p in parameters], 2 * self.loss_scale if self.loss_scale else 1.0",
        "DP 2 × PP 2",
        r"step 1, weight cls_token",
        FP16,
        (OWN,),
        why=EVERYWHERE + "the scale is the same in each",
    ),
    Mutation(
        "loss scale applied twice",
        "A pipeline stage scales the gradient that it receives, which has the loss scale already.",
        ENGINE,
        "super().backward_by_grad(tensor, grad)",
        "super().backward_by_grad(tensor, grad * (self.optimizer.loss_scale or 1.0))",
        "PP 2",
        r"step 2, gradient at blocks\.0\.mlp\.drop2",
        FP16_SMALL_SCALE,
        (OWN,),
    ),
    Mutation(
        "gradient between stages twice",
        "A pipeline stage counts the gradient that it receives twice.",
        ENGINE,
        "super().backward_by_grad(tensor, grad)",
        "super().backward_by_grad(tensor, 2 * grad)",
        "PP 2",
        r"step 2, gradient at blocks\.0\.mlp\.drop2",
    ),
    Mutation(
        "learning rate per batch",
        "Fix undone: the learning rate is scheduled for each batch, not for each optimizer step.",
        LOOP,
        "                engine.step()  # after the last micro-batch: reduces and clips gradients, updates weights\n",
        "                engine.step()\n                if self.lr_scheduler and engine._micro_step:\n"
        "                    self.lr_scheduler.step()\n",
        "accumulation 2",
        r"step 1, lr",
    ),
    Mutation(
        "schedule counts batches",
        "The schedule is as long as an epoch has batches, not optimizer steps.",
        TRAIN,
        "len(train_dataloader) // config.gradient_accumulation",
        "len(train_dataloader)",
        "accumulation 2",
        r"step 2, lr",
    ),
    Mutation(
        "warm-up one step too far",
        "Fix undone: the learning rate after the warm-up is above its base rate.",
        SCHEDULES,
        "return (step + 1) / warmup_steps",
        "return (step + 2) / warmup_steps",
        "DP 2",
        r"step 1, weight cls_token",
        ("WARMUP_EPOCHS=1", "NUM_EPOCHS=2"),
        why=EVERYWHERE + "tests assert the learning rates one by one",
    ),
    Mutation(
        "layers counted in the stage",
        "Layer-wise learning rates take a stage's number of blocks for the model's.",
        OPTIMIZER,
        'return config.get("DEPTH") or len(getattr(model, "blocks", ()))',
        'return len(getattr(model, "blocks", ()))',
        "PP 2",
        r"step 1, (lr|weight (cls_token|pos_embed|patch_embed\..*|blocks\.0\..*))",
        ("LAYER_DECAY=0.75",),
    ),
    Mutation(
        "parameters named by chunk",
        "Layer-wise learning rates look up a parameter's name in its chunk, which matches no block's.",
        OPTIMIZER,
        '        name = parameter.shard.name if hasattr(parameter, "shard") else name\n',
        "",
        "PP 2 × chunks 2",
        r"step 1, (lr|weight (cls_token|pos_embed|patch_embed\..*|blocks\.0\..*))",
        (*FOUR_BLOCKS, "LAYER_DECAY=0.75"),
    ),
    Mutation(
        "trust ratio of shards",
        "LAMB's trust ratios are made of the norms of each rank's own shards.",
        LAMB,
        "            updates = self._with_global_norms(batches, list(updates), groups)\n",
        "            updates = list(updates)\n",
        "1D 2",
        r"step 2, weight blocks\.0\.attn\.proj\.weight",
        LAMB_OPTIMIZER,
    ),
    Mutation(
        "trust ratio with unused shards",
        "In 2.5D LAMB's norms count shards that their ranks do not use.",
        LAMB,
        'if not hasattr(p, "shard") or p.shard.in_use',
        "if True",
        "2.5D 8",
        r"step 2, weight blocks\.0\..*(bias|norm\d\.weight)",
        LAMB_OPTIMIZER,
    ),
    Mutation(
        "orthogonalised in pieces",
        "Each rank orthogonalises its own piece of a matrix.",
        MUON,
        """        whole = parameter.shard.gather(update.to(self.dtype or update.dtype))
        matrices = whole.reshape(group["matrices"], -1, whole.size(1))
        piece = parameter.shard.split(orthogonalise(matrices).reshape(whole.shape)).to(parameter.dtype)
""",
        """        matrices = update.reshape(group["matrices"], -1, update.size(1))
        piece = orthogonalise(matrices).reshape(update.shape)
""",
        "1D 2",
        r"step 2, weight blocks\.0\.attn\.proj\.weight",
        MUON_OPTIMIZER,
    ),
    Mutation(
        "Newton-Schulz with the norm of a piece",
        "Each rank divides its piece of an update by the piece's norm, before it is orthogonalised.",
        MUON,
        "parameter.shard.gather(update.to(self.dtype or update.dtype))",
        "parameter.shard.gather(update / (update.norm() + 1e-7))",
        "2D 4",
        r"step 2, weight blocks\.0\.attn\.proj\.weight",
        MUON_OPTIMIZER,
    ),
    Mutation(
        "pieces of an update in another order",
        "In 3D the pieces of Muon's updates are put together in the order of the first group, not of the last.",
        MUON,
        "parameter.shard.gather(",
        "type(s := parameter.shard)(s.name, s.splits[::-1], s.transposed, s.owner, s.num_heads).gather(",
        "3D 8",
        r"step 2, weight blocks\.0\.attn\.proj\.weight",
        MUON_OPTIMIZER,
    ),
    Mutation(
        "queries, keys and values as one matrix",
        "Where ranks hold pieces, queries, keys and values are orthogonalised together.",
        MUON,
        'matrices = whole.reshape(group["matrices"], -1,',
        'matrices = whole.reshape(1 if parameter.shard.splits else group["matrices"], -1,',
        "1D 2",
        r"step 2, weight blocks\.0\.attn\.qkv\.weight",
        MUON_OPTIMIZER,
    ),
    Mutation(
        "rate of a piece",
        "Muon's learning rate is adjusted to the shape of a rank's piece.",
        MUON,
        "max(matrices.shape[1:])",
        "max(parameter.shape)",
        "1D 2",
        r"step 2, weight blocks\.0\.attn\.qkv\.weight",
        MUON_OPTIMIZER,
    ),
    Mutation(
        "average of another step",
        "The growing decay of the averaged weights counts micro-batches.",
        ENGINE,
        "self.ema.update(self.num_steps)",
        "self.ema.update(self.num_steps * self.accumulation)",
        "accumulation 2",
        r"step 1, average of .*",
        ("ema.decay=0.9", "ema.warmup=True"),
    ),
    Mutation(
        "averages not sent before evaluation",
        "With split optimizer state the averages that are evaluated are only a rank's own, and others' weights.",
        EMA,
        "        if self.publish:\n            self.publish()",
        "        if self.publish and False:\n            self.publish()",
        "DP 2 × zero 1",
        r"step 3, ema_loss",
        ("ema.decay=0.9",),
    ),
    Mutation(
        "logged loss of one replica",
        "The loss that is logged is that of the first replica.",
        ENGINE,
        "(replicas := gpc.get_world_size(ParallelMode.DATA)) > 1:",
        "(replicas := 1) > 1:",
        "DP 2",
        r"step 2, loss",
    ),
    Mutation(
        "logged loss of the last micro-batch",
        "The loss that is logged is that of the last micro-batch.",
        ENGINE,
        "loss = torch.stack(self._losses).mean(dtype=torch.float64)",
        "loss = self._losses[-1].double()",
        "accumulation 2",
        r"step 2, loss",
    ),
    Mutation(
        "half precision kept for the loss",
        "A pipeline's logits reach the loss in half precision, one process's in fp32.",
        PRECISION,
        "last = len(chunks) - 1 if is_no_pp_or_last_stage() and not full else None",
        "last = len(chunks) - 1 if torch.distributed.get_world_size() == 1 and not full else None",
        "PP 2",
        r"step 1, loss",
        BF16,
        (OWN,),
    ),
]

PIPELINES = [
    Mutation(
        "messages swapped",
        "Fix undone: with two stages, activations and gradients of an interleaved pipeline are swapped.",
        PATCHES,
        "    p2p.filling_ops_queue = _filling_ops_queue\n",
        "",
        "PP 2 × chunks 2 × micro-batches 4",
        r"step 1, (output|gradient at) blocks\..*",
        FOUR_BLOCKS,
    ),
    Mutation(
        "images for every chunk",
        "Fix undone: each chunk of the first rank gets images.",
        ASSEMBLY,
        "return (images if gpc.is_pipeline_first_stage() else stage_output), labels",
        "return (images if gpc.is_first_rank(ParallelMode.PIPELINE) else stage_output), labels",
        "PP 2 × chunks 2",
        r"step 1, output blocks\.2\.norm1",
        FOUR_BLOCKS,
        why=FAILS,
    ),
    Mutation(
        "gradients received as fp32",
        "Fix undone: an interleaved pipeline receives its last gradients as fp32.",
        ASSEMBLY,
        "    set_pipeline_dtype(dtype)\n",
        "",
        "PP 2 × chunks 2",
        r"step 1, gradient at blocks\..*",
        FOUR_BLOCKS,
        (FP64,),
        why=FAILS,
    ),
    Mutation(
        "places of the first micro-batch",
        "Every micro-batch of a pipeline has the random numbers of the first one.",
        ASSEMBLY,
        "        with engine.forward_pass(range(first, first + self.microbatch_size), self.batch_size):\n"
        "            return super()._forward_step(engine, *args, **options)",
        "        with engine.forward_pass(range(self.microbatch_size), self.batch_size):\n"
        "            return super()._forward_step(engine, *args, **options)",
        "PP 2",
        r"step 1, (input images|output pos_drop)",
    ),
    Mutation(
        "places of the next micro-batch",
        "An interleaved pipeline takes the places of the micro-batch that comes next.",
        ASSEMBLY,
        "        first = self.microbatch_offset[model_chunk_id]\n",
        "        first = (self.microbatch_offset[model_chunk_id] + self.microbatch_size) % self.batch_size\n",
        "PP 2 × chunks 2",
        r"step 1, (input images|output pos_drop)",
        FOUR_BLOCKS,
    ),
    Mutation(
        "places without the replica",
        "Every replica has the random numbers of the first one.",
        ENGINE,
        "first = (self._micro_step * replicas + replica) * batch_size",
        "first = self._micro_step * replicas * batch_size",
        "DP 2",
        r"step 1, (input images|output pos_drop)",
    ),
    Mutation(
        "places without the micro-batch",
        "Every micro-batch of an accumulated step has the random numbers of the first one.",
        ENGINE,
        "first = (self._micro_step * replicas + replica) * batch_size",
        "first = replica * batch_size",
        "accumulation 2",
        r"step 1, (input images|output pos_drop)",
    ),
    Mutation(
        "micro-batches counted as steps",
        "Dropout counts micro-batches, not optimizer steps.",
        ENGINE,
        "torch.full_like(places, self.num_steps)",
        "torch.full_like(places, self.num_steps * self.accumulation + self._micro_step)",
        "accumulation 2",
        r"step 1, output pos_drop",
    ),
    Mutation(
        "the same masks in every step",
        "Dropout does not count steps.",
        ENGINE,
        "torch.full_like(places, self.num_steps)",
        "torch.zeros_like(places)",
        "DP 2",
        r"step 2, output pos_drop",
        why=EVERYWHERE + "tests/test_random.py looks at the masks themselves",
    ),
]

RANDOM_NUMBERS = [
    Mutation(
        "masks of the first channels",
        "Each rank has the mask of the first channels, whichever it has.",
        DROPOUT,
        "else x, samples, key, first, channels)",
        "else x, samples, key, 0, channels)",
        "1D 2",
        r"step 1, output blocks\.0\.mlp\.drop1",
    ),
    Mutation(
        "masks drawn one after the other",
        "A sample's mask follows from how many were drawn before it.",
        KERNEL,
        "first = place * per_sample",
        "first = 0",
        "DP 2",
        r"step 1, output pos_drop",
    ),
    Mutation(
        "the same mask in every layer",
        "The counter of dropout lacks the layer.",
        KERNEL,
        '"dropout", 0, layer, step, start=first)',
        '"dropout", 0, 0, step, start=first)',
        "1D 2",
        r"step 1, output pos_drop",
        why=EVERYWHERE + "tests/test_philox.py compares masks with the textbook's",
    ),
    Mutation(
        "names hashed by Python",
        "The words for names are Python's hashes, which differ from process to process.",
        PHILOX,
        "return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())",
        "return hash(name) % 2**56",
        "DP 2",
        r"step 1, output pos_drop",
        why="ranks are forks of one process, which all have its hashes. Under torchrun they would not",
    ),
    Mutation(
        "another mask in the backward pass",
        "The backward pass of dropout has the mask of the first channels.",
        DROPOUT,
        "function(grad.contiguous(), x, samples, key, *ctx.options)",
        "function(grad.contiguous(), x, samples, key, 0, *ctx.options[1:])",
        "1D 2",
        r"step 2, gradient at blocks\.1\.mlp\.fc1",
    ),
    Mutation(
        "drop path by channel",
        "In 2D drop path drops other samples for each part of the channels.",
        DROPOUT,
        "super().__init__(rate, part._replace(column=0, columns=1))",
        "super().__init__(rate, part)",
        "2D 4",
        r"step 1, output blocks\.1\.(drop_path1|norm2)",
    ),
    Mutation(
        "samples of the first rows",
        "In 2D each rank drops its part of the batch as if it were the first one.",
        DROPOUT,
        "samples.chunk(part.rows)[part.row]",
        "samples[: len(x)]",
        "2D 4",
        r"step 1, output pos_drop",
    ),
]

DATA = [
    Mutation(
        "order without a seed of its own",
        "Fix undone: the order of the samples is each rank's own, so that a later stage has other labels.",
        SAMPLERS,
        "manual_seed(self.seed * 1_000_003 + epoch)",
        "manual_seed(self.seed * 1_000_003 + epoch + gpc.get_global_rank())",
        "PP 2",
        r"step 1, labels",
    ),
    Mutation(
        "order seeded by replica",
        "Each replica has an order of the samples of its own.",
        SAMPLERS,
        "manual_seed(self.seed * 1_000_003 + epoch)",
        "manual_seed(self.seed * 1_000_003 + epoch + self.rank)",
        "DP 2",
        r"step 1, input images",
    ),
    Mutation(
        "replicas swapped",
        "Each replica has the samples of the one before it.",
        SAMPLERS,
        "return iter(order[:, self.rank])",
        "return iter(order[:, self.rank - 1])",
        "DP 2",
        r"step 1, input images",
    ),
    Mutation(
        "off by one in the order",
        "Rank r begins r samples later.",
        SAMPLERS,
        "order = order[: steps * self.global_batch_size].view(-1,",
        "order = order[self.rank : self.rank + steps * self.global_batch_size].view(-1,",
        "DP 2",
        r"step 1, input images",
    ),
    Mutation(
        "an epoch cut for each rank",
        "Each replica has consecutive batches of an epoch, so that global batches depend on how many there are.",
        SAMPLERS,
        ".view(-1, self.num_ranks, self.batch_size)[self.start :]",
        ".view(self.num_ranks, -1, self.batch_size).transpose(0, 1)[self.start :]",
        "DP 2",
        r"step 1, input images",
    ),
    Mutation(
        "off by one at the start",
        "An epoch begins with the second batch of each rank.",
        SAMPLERS,
        "[self.start :]\n        self.epoch",
        "[self.start + 1 :]\n        self.epoch",
        "accumulation 2",
        r"step 1, input images",
    ),
    Mutation(
        "augmentation seeded by replica",
        "Each replica draws shifts and mirror images of its own.",
        CIFAR10,
        "self.sampler.generator(-1 - self.sampler.epoch)",
        "self.sampler.generator(-1 - self.sampler.epoch - 7 * self.sampler.rank)",
        "DP 2",
        r"step 1, input images",
    ),
    Mutation(
        "augmentation by place in the batch",
        "Shifts and mirror images depend on the place of an image in the batch of its rank.",
        CIFAR10,
        "images = self._crop(images, shifts[indices], mirrored[indices])",
        "images = self._crop(images, shifts[: len(indices)], mirrored[: len(indices)])",
        "DP 2",
        r"step 1, input images",
    ),
]

LAYERS = [
    Mutation(
        "variance of a rank's channels",
        "In 2D a norm leaves out how far the means of the parts are from each other.",
        NORMS,
        "return mean, torch.rsqrt(scales.pow(-2).mean(0) + spread)",
        "return mean, torch.rsqrt(scales.pow(-2).mean(0))",
        "2D 4",
        r"step 1, output blocks\.0\.norm1",
    ),
    Mutation(
        "mean of a rank's channels",
        "In 3D a norm subtracts the mean of each rank's own channels.",
        NORMS,
        "    spread, mean = torch.var_mean(means, 0, correction=0)\n",
        "    spread, _ = torch.var_mean(means, 0, correction=0)\n",
        "3D 8",
        r"step 1, output blocks\.0\.norm1",
    ),
    Mutation(
        "backward of a norm not reduced",
        "The backward pass of a norm has the sums over each rank's own channels.",
        NORMS,
        "    dist.all_reduce(sums, group=group)\n",
        "",
        "2D 4",
        r"step 2, gradient at blocks\.1\.(drop_path2|mlp\.drop2)",
    ),
    Mutation(
        "gradient of a norm not reduced",
        "In 3D the gradients of a norm's weight and bias are those of a rank's own samples.",
        NORMS,
        "work = all_reduce(total, group=",
        "work = all_reduce(total.clone(), group=",
        "3D 8",
        r"step 2, gradient of blocks\.0\.norm1\.weight",
    ),
    Mutation(
        "norms of 2D in half precision",
        "Fix undone: norms of 2D sum squares in the type of the activations.",
        PATCHES,
        "    parallel_2d.LayerNorm2D.forward = norms.forward_2d\n",
        "",
        "2D 4",
        r"step 1, output blocks\.0\.norm1",
        FP16,
        (OWN,),
        why="the sums overflow from an RMS of 10 on, which no activation has yet: only other rounding shows",
    ),
    Mutation(
        "autocast ignored",
        "Fix undone: operations of 2D do not follow autocast to bfloat16.",
        PATCHES,
        "                _follow_autocast(value)\n",
        "                pass\n",
        "2D 4",
        r"step 1, output blocks\.0\.attn\.qkv",
        BF16_AUTOCAST,
        (OWN,),
        why=FAILS,
    ),
    Mutation(
        "3D's hook without a gradient",
        "Fix undone: the hook that gives parameters of 3D their gradients gets none.",
        PATCHES,
        "    parallel_3d_utils._async_grad_hook = _async_grad_hook\n",
        "",
        "3D 8",
        r"step 1, gradient of head\.weight",
        why=FAILS,
    ),
    Mutation(
        "pending gradient in addition",
        "The hook of 3D's parameters adds a reduced gradient twice.",
        PATCHES,
        "return pending if grad is None else grad.add_(pending)",
        "return 2 * pending if grad is None else grad.add_(pending, alpha=2)",
        "3D 8",
        r"step 1, gradient of head\.weight",
    ),
]

CHECKPOINTS = [
    Mutation(
        "moments not resharded",
        "A rank that resumes takes the first elements of a moment, whichever piece it has.",
        TENSORS,
        "piece = slot.shard.split(tensor).to(slot.master.device, copy=True).contiguous()",
        "piece = tensor.flatten()[: slot.master.numel()].view_as(slot.master).clone()",
        "1D 2",
        r"step 3, exp_avg of .*",
    ),
    Mutation(
        "no moments",
        "Fix undone: a checkpoint's moments are not loaded.",
        CHECKPOINTER,
        "        if trained:\n            updates =",
        "        if trained and not trained:\n            updates =",
        "1D 2",
        r"step 3, exp_avg of .*",
    ),
    Mutation(
        "updates counted from zero",
        "A run that resumes corrects the bias of moments as if they were new.",
        TENSORS,
        '.setdefault(number_of[slot.master], {"step": fewer.get(name, updates)})',
        '.setdefault(number_of[slot.master], {"step": 0})',
        "1D 2",
        r"step 3, weight .*",
    ),
    Mutation(
        "resumed a batch too late",
        "A resumed run skips a batch.",
        CHECKPOINTER,
        'self.train_dataloader.seek(state["epoch"], steps * trainer.engine.accumulation)',
        'self.train_dataloader.seek(state["epoch"], steps * trainer.engine.accumulation + 1)',
        "PP 2",
        r"step 3, input images",
        why="the run takes itself for finished, and evaluates: it lacks step 3, where the images would differ",
    ),
    Mutation(
        "a batch skipped",
        "A loader that begins within an epoch skips a batch.",
        SAMPLERS,
        "self.epoch, self.start = epoch, start",
        "self.epoch, self.start = epoch, start + (start > 0)",
        "PP 2",
        r"step 3, input images",
    ),
    Mutation(
        "resumed by this layout's batches",
        "The place in an epoch is counted in batches of the layout that resumes, not in images.",
        CHECKPOINTER,
        'steps = min(state["images"] // run.layout.global_batch(run.config), steps_per_epoch)',
        'steps = min(state["images"] // run.config.BATCH_SIZE, steps_per_epoch)',
        "DP 2",
        r"step 3, input images",
        why="the run takes itself for finished, and evaluates: it lacks step 3, where the images would differ",
    ),
    Mutation(
        "steps counted from the resume",
        "A run that resumes counts its steps from 0, so that dropout has the numbers of the first one.",
        CHECKPOINTER,
        'engine.num_steps = state["step"]\n        self.trainer.cur_epoch',
        "self.trainer.cur_epoch",
        "1D 2",
        r"step 1, input images",
    ),
    Mutation(
        "schedule from the start",
        "A run that resumes has the learning rates of its first steps.",
        CHECKPOINTER,
        'if scheduled := state["epoch"] * steps_per_epoch + steps:',
        "if scheduled := 0:",
        "PP 2",
        r"step 3, lr",
    ),
    Mutation(
        "averages not loaded",
        "A run that resumes begins its averages with the weights.",
        CHECKPOINTER,
        "if run_on_rank_0(lambda: storage.EMA in found.files):",
        "if run_on_rank_0(lambda: False):",
        "1D 2",
        r"step 3, average of .*",
        ("ema.decay=0.9",),
    ),
    Mutation(
        "moments of the first stage only",
        "A checkpoint has moments of 0 for what the last of the pipeline's stages has.",
        FULL_TENSORS,
        "                    dist.send(tensor.cpu().contiguous(), 0, group=cpu)",
        "                    dist.send(tensor.cpu().contiguous() * (kind == WEIGHT), 0, group=cpu)",
        "PP 2",
        r"step 1, exp_avg of .*",
    ),
    Mutation(
        "pieces of a moment in the wrong order",
        "In a checkpoint the query, key and value of a moment are as the layer has them, not as timm does.",
        FULL_TENSORS,
        "                    tensor = slot.shard.gather(piece)\n",
        "                    shard = slot.shard if kind == WEIGHT else type(slot.shard)('', slot.shard.splits)\n"
        "                    tensor = shard.gather(piece)\n",
        "1D 2",
        r"step 3, exp_avg of blocks\.0\.attn\.qkv\.(weight|bias)",
    ),
]

EVALUATION = [
    Mutation(
        "accuracy of one replica",
        "The evaluation counts the images of the first replica.",
        METRICS,
        "for mode in (ParallelMode.DATA, ParallelMode.TENSOR):",
        "for mode in (ParallelMode.TENSOR,):",
        "DP 2",
        r"step 3, eval_(loss|images)",
    ),
    Mutation(
        "labels of another part in evaluation",
        "In 2D the evaluation splits labels without regard to micro-batches.",
        METRICS,
        "label = split_batch(label.view(micro_batches, -1), dim=1).flatten()",
        "label = split_batch(label)",
        "PP 2 × 2D 4",
        r"step 3, eval_loss",
    ),
    Mutation(
        "images counted once for each rank",
        "Under 1D the evaluation counts an image for each rank that has seen it.",
        METRICS,
        "copies = gpc.tensor_parallel_size // self.batch_parts",
        "copies = 1",
        "1D 2",
        r"step 3, eval_images",
    ),
    Mutation(
        "last test batch twice",
        "Places that are left over in the last test batch count as images.",
        CIFAR10,
        "labels = torch.where(indices < 0, IGNORED, self.labels[images])",
        "labels = self.labels[images]",
        "DP 2",
        r"step 3, eval_loss",
        why=EVERYWHERE + "the last global batch is as long in each",
    ),
    Mutation(
        "dropout in evaluation",
        "The model stays in training mode while it is evaluated.",
        LOOP,
        "        self.engine.eval()\n        batches = iter(test_dataloader)",
        "        batches = iter(test_dataloader)",
        "PP 2",
        r"step 3, eval_loss",
        why="what is recorded in training mode counts as training: the test images are recorded as images of step 3",
    ),
]

MUTATIONS = [
    *MODEL,
    *SHARDS,
    *REDUCTIONS,
    *STEPS,
    *PIPELINES,
    *RANDOM_NUMBERS,
    *DATA,
    *LAYERS,
    *CHECKPOINTS,
    *EVALUATION,
]
