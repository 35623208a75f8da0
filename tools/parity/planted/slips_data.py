"""Slips in data, augmentation, packing, predictions and exports."""

from tools.parity.planted.slips import Slip

AUGMENT, BATCHES, DECODING, DIGITS, FOLDER, SAMPLERS = (
    f"colossal_vit/data/{name}.py"
    for name in (
        "augment",
        "batches",
        "decoding",
        "digits",
        "image_folder",
        "samplers",
    )
)
CIFAR10, FASHION = (f"vit_cifar10_hybrid/{name}.py" for name in ("cifar10", "fashion_mnist"))
CLASS_IMAGES = "colossal_vit/data/class_images.py"
DRAWS, FILES, IMAGENET, MIXING, TFRECORD = (
    f"vit_imagenet_dali/{name}.py"
    for name in ("dali_augmentation", "image_files", "imagenet_dali_dataloader", "mixup", "tfrecord")
)
EXPORT, PREDICT = "colossal_vit/checkpoint/timm_model.py", "colossal_vit/predict.py"
# Tests.
BY_HAND = (
    "vit_imagenet_dali/tests/test_dali.py::test_what_is_drawn_for_an_image_is_worked_out_from_seed_epoch_and_number",
)
PIXELS = ("vit_imagenet_dali/tests/test_dali.py::test_training_images_are_what_torchvision_makes_of_their_crops",)
ON_GPU = (
    "vit_imagenet_dali/tests/test_dali.py::test_evaluated_images_are_what_torchvision_makes_of_them",
    "vit_imagenet_dali/tests/test_dali.py::test_training_images_are_what_torchvision_makes_of_their_crops",
)
OPERATIONS = ("vit_imagenet_dali/tests/test_dali.py::test_operations_equal_torchvisions_image_by_image",)
SHAPES = ("vit_imagenet_dali/tests/test_dali.py::test_shapes_of_rectangles_are_distributed_as_torchvisions",)
PLACES = ("vit_imagenet_dali/tests/test_dali.py::test_crops_are_placed_as_torchvision_places_them",)
TORCHVISION = ("tests/test_augment.py::test_augmented_image_equals_torchvisions_to_the_bit",)
COPIES = ("tests/test_augment.py::test_copies_of_an_image_are_augmented_each_in_its_own_way",)
TIMMS = ("vit_imagenet_dali/tests/test_mixup.py::test_images_and_targets_equal_timms_for_the_same_draws",)
MIXED = (
    "vit_imagenet_dali/tests/test_mixup.py::test_what_is_drawn_for_a_batch_is_that_of_the_seed_the_epoch_and_the_step",
)
LATER = ("vit_imagenet_dali/tests/test_mixup.py::test_a_later_pipeline_stage_has_the_same_targets",)
RECORDS = ("vit_cifar10_hybrid/tests/test_cifar10.py::test_bytes_of_a_record_are_label_red_green_and_blue_row_by_row",)
PYTHON = ("vit_cifar10_hybrid/tests/test_cifar10.py::test_python_files_are_read_as_torchvision_shows_them",)
NORMALISED = (
    "vit_cifar10_hybrid/tests/test_cifar10.py::test_channels_are_normalised_each_by_its_own_mean_and_deviation",
)
ENLARGED = ("vit_cifar10_hybrid/tests/test_cifar10.py::test_images_of_another_size_are_resized_as_torchvision_does",)
SHIFTED = ("vit_cifar10_hybrid/tests/test_cifar10.py::test_augmentation_shifts_and_mirrors_each_epoch_anew",)
ORDER = (
    "tests/test_data.py::test_places_in_an_epoch_are_those_worked_out_by_hand",
    "tests/test_data.py::test_an_epoch_of_shards_is_the_one_worked_out_by_hand",
)
EVALUATED = ("tests/test_data.py::test_places_in_an_evaluation_are_those_worked_out_by_hand",)
AHEAD = ("tests/test_data.py::test_a_batch_is_read_ahead_while_the_one_before_is_in_use",)
RANDOM = ("tests/test_data.py::test_random_images_are_those_of_the_seed",)
SCANNED = ("tests/test_data.py::test_digits_are_those_of_scikit_learn",)
FASHIONABLE = ("vit_cifar10_hybrid/tests/test_fashion_mnist.py::test_images_are_those_of_the_files",)
CROPS = ("vit_caltech101_amp/tests/test_caltech101.py::test_crops_are_distributed_as_torchvisions",)
EPOCHS = (
    "vit_caltech101_amp/tests/test_caltech101.py::test_an_epoch_has_every_image_once_and_another_augmentation_each_time",
)
DECODED = ("vit_caltech101_amp/tests/test_caltech101.py::test_a_photograph_is_decoded_as_pillow_shows_it",)
SPLIT = ("vit_caltech101_amp/tests/test_caltech101.py::test_split_is_that_of_earlier_versions",)
ANY_KIND = ("vit_imagenet_dali/tests/test_crops.py::test_an_image_of_any_kind_is_the_same_in_all_scripts",)
RESIZED = ("vit_imagenet_dali/tests/test_tfrecords.py::test_resized_image_keeps_its_aspect_and_is_never_enlarged",)
GREY = ("vit_imagenet_dali/tests/test_tfrecords.py::test_grey_of_16_bits_is_rounded",)
WHITE = ("vit_imagenet_dali/tests/test_tfrecords.py::test_pixels_of_png_are_kept_in_eight_bits_on_white",)
THEIRS = ("vit_imagenet_dali/tests/test_tfrecords.py::test_tensorboard_reads_the_records",)
SAME_BYTES = ("vit_imagenet_dali/tests/test_tfrecords.py::test_the_same_image_and_label_make_the_same_bytes",)
PARSED = ("vit_imagenet_dali/tests/test_tfrecords.py::test_an_example_of_others_is_parsed",)
PHOTOGRAPH = ("tests/test_predict.py::test_photograph_is_predicted_upright_and_in_its_colours",)
EXPORTED = ("tests/test_predict.py::test_exported_preprocessing_makes_the_pixels_of_the_evaluation",)
OF_IMAGENET = ("vit_imagenet_dali/tests/test_dali.py::test_exported_preprocessing_makes_the_pixels_of_the_evaluation",)

SLIPS: list[Slip] = [
    # ---- ImageNet: what is drawn ----
    Slip(
        "the same draws in every epoch", DRAWS, '"augmentation", epoch, numbers', '"augmentation", 0, numbers', BY_HAND
    ),
    Slip("the same noise in every epoch", DRAWS, '"erasing", epoch, number', '"erasing", 0, number', BY_HAND),
    Slip("the same noise for every image", DRAWS, '"erasing", epoch, number', '"erasing", epoch, 0', BY_HAND),
    Slip(
        "the loader draws for epoch 0",
        IMAGENET,
        "augmentation.draw(self.config, epoch,",
        "augmentation.draw(self.config, 0,",
        PIXELS,
    ),
    Slip(
        "epochs ahead count as the first",
        IMAGENET,
        "yield from ((epoch, numbers) for",
        "yield from ((sampler.epoch * 0, numbers) for",
        PIXELS,
    ),
    Slip(
        "copies of an image have its draws",
        IMAGENET,
        "draw(self.config, epoch, numbers.numpy())",
        "draw(self.config, epoch, records)",
        ("vit_imagenet_dali/tests/test_dali.py::test_copies_of_an_image_are_augmented_each_in_its_own_way",),
    ),
    Slip("3-Augment never blurs", DRAWS, "choice[:, 0] * 3", "choice[:, 0] * 2", BY_HAND),
    Slip("mirrored if the first crop is small", DRAWS, "mirror[:, 0] < 0.5", "crop[:, 0] < 0.5", BY_HAND),
    Slip("more images mirrored", DRAWS, "mirror[:, 0] < 0.5", "mirror[:, 0] < 0.6", BY_HAND),
    Slip(
        "colour jitter only darkens",
        DRAWS,
        "max(1 - strength, 0.0), 1 + strength",
        "max(1 - strength, 0.0), 1.0",
        BY_HAND,
    ),
    Slip(
        "one factor for all of the jitter",
        DRAWS,
        "1 + strength, jitter)",
        "1 + strength, jitter[:, :1].repeat(3, 1))",
        BY_HAND,
    ),
    Slip(
        "RandAugment without its last operation",
        DRAWS,
        "operations * len(RAND_AUGMENT)",
        "operations * (len(RAND_AUGMENT) - 1)",
        BY_HAND,
    ),
    Slip("RandAugment's signs follow its operations", DRAWS, "(signs < 0.5)", "(operations < 0.5)", BY_HAND),
    Slip(
        "RandAugment does its first operation in each turn",
        DRAWS,
        "operations[number], images",
        "operations[0], images",
        ("vit_imagenet_dali/tests/test_dali.py::test_rand_augment_does_its_turns_in_their_order",),
    ),
    Slip("erased rectangles of another size", DRAWS, "(0.02, 0.33), (0.3, 3.3)", "(0.02, 0.4), (0.3, 3.3)", BY_HAND),
    # ---- ImageNet: rectangles ----
    Slip(
        "aspects uniform", DRAWS, "np.exp(_between(*map(log, aspect), aspects))", "_between(*aspect, aspects)", SHAPES
    ),
    Slip(
        "heights for widths", DRAWS, "[pixels / ratios, pixels * ratios]", "[pixels * ratios, pixels / ratios]", SHAPES
    ),
    Slip(
        "areas uniform in their roots", DRAWS, "_between(*area, areas)", "_between(*np.sqrt(area), areas) ** 2", SHAPES
    ),
    Slip(
        "rectangles on the diagonal",
        DRAWS,
        "places * (whole - shape + 1)",
        "places[:, :1] * (whole - shape + 1)",
        PLACES,
    ),
    Slip(
        "never at the bottom or on the right",
        DRAWS,
        "places * (whole - shape + 1)",
        "places * (whole - shape) * 0.9",
        PLACES,
    ),
    Slip("the largest rectangle in a corner", DRAWS, "(whole - shape) // 2)", "0)", PLACES),
    Slip(
        "only the last try for a rectangle",
        DRAWS,
        ".all(2).argmax(1)",
        ".all(2)[:, TRIES - 1 :].argmax(1) + TRIES - 1",
        BY_HAND,
    ),
    # ---- ImageNet: pixels ----
    Slip(
        "a GPU normalises values up to 255 as up to 1",
        IMAGENET,
        "[value * 255 for value in values]",
        "[value for value in values]",
        ON_GPU,
    ),
    Slip(
        "a GPU flips upside down",
        IMAGENET,
        "**options), horizontal=mirror)",
        "**options), vertical=mirror, horizontal=0)",
        ON_GPU,
    ),
    Slip(
        "a GPU evaluates whole images, distorted",
        IMAGENET,
        "roi_start=start, roi_end=end, **options",
        "**options",
        ON_GPU,
    ),
    Slip(
        "a GPU evaluates rows for columns",
        IMAGENET,
        "source(header[:2].astype(int)",
        "source(header[1::-1].astype(int)",
        ON_GPU,
    ),
    Slip("a GPU takes the nearest pixel", IMAGENET, "types.INTERP_LINEAR", "types.INTERP_NN", ON_GPU),
    Slip(
        "a GPU resizes without antialiasing",
        IMAGENET,
        "interp_type=types.INTERP_LINEAR)",
        "interp_type=types.INTERP_LINEAR, antialias=False)",
        ON_GPU,
    ),
    Slip(
        "a GPU swaps mean and deviation",
        IMAGENET,
        "mean=mean, std=std, output_layout",
        "mean=std, std=mean, output_layout",
        ON_GPU,
    ),
    Slip(
        "a GPU's crop is not in the middle",
        IMAGENET,
        "list(np.float32(starts))",
        "list(np.float32(starts) * 0)",
        ON_GPU,
    ),
    Slip("a GPU's images have channels last", IMAGENET, 'output_layout="CHW"', 'output_layout="HWC"', ON_GPU),
    Slip("DALI decodes to BGR", IMAGENET, "output_type=types.RGB", "output_type=types.BGR", PIXELS),
    Slip("DALI crops columns for rows", IMAGENET, 'axis_names="HW"', 'axis_names="WH"', PIXELS),
    Slip("a CPU flips upside down", IMAGENET, "pixels.flip(2)", "pixels.flip(1)", PIXELS),
    Slip(
        "a CPU resizes without antialiasing",
        IMAGENET,
        "resize(pixels, size)",
        "resize(pixels, size, antialias=False)",
        PIXELS,
    ),
    Slip("a CPU's table divides by 256", IMAGENET, "np.arange(256) / 255", "np.arange(256) / 256", PIXELS),
    Slip(
        "a CPU normalises with the first channel's",
        IMAGENET,
        "table[channel], normalized",
        "table[0], normalized",
        PIXELS,
    ),
    Slip(
        "threads' images in reverse",
        IMAGENET,
        "bounds = [count * part // self.num_threads for part",
        "bounds = [count - count * part // self.num_threads for part",
        PIXELS,
    ),
    Slip("red and blue of ImageNet's mean swapped", IMAGENET, "(0.485, 0.456, 0.406)", "(0.406, 0.456, 0.485)", PIXELS),
    Slip(
        "labels of records from 1",
        IMAGENET,
        "np.uint8), label - 1",
        "np.uint8), label % self.config.NUM_CLASSES",
        ("vit_imagenet_dali/tests/test_dali.py::test_labels_belong_to_their_images",),
    ),
    Slip(
        "left-over places of an evaluation count",
        IMAGENET,
        "torch.where(numbers < 0, IGNORED",
        "torch.where(numbers < -1, IGNORED",
        ("vit_imagenet_dali/tests/test_dali.py::test_evaluation_counts_each_image_once",),
    ),
    Slip("DALI's blur is narrower", DRAWS, "sigma=sigma, window_size", "sigma=sigma / 2, window_size", OPERATIONS),
    Slip("contrast about the middle grey", DRAWS, "contrast_center=middle.cpu()", "contrast_center=127.5", OPERATIONS),
    Slip("solarisation from another value", AUGMENT, "SOLARIZED = 128", "SOLARIZED = 192", OPERATIONS),
    # ---- Augmentation by torchvision ----
    Slip(
        "the same augmentation in every epoch",
        AUGMENT,
        "(self.seed, epoch, number)",
        "(self.seed, 0, number)",
        TORCHVISION,
    ),
    Slip(
        "the same augmentation for every image",
        AUGMENT,
        "(self.seed, epoch, number)",
        "(self.seed, epoch, 0)",
        TORCHVISION,
    ),
    Slip("noise is normalised, too", AUGMENT, "self.erasing(result))", "self.erasing(result).sub_(mean))", TORCHVISION),
    Slip(
        "jitter of three times the strength of saturation",
        AUGMENT,
        "v2.ColorJitter(strength, strength, strength)",
        "v2.ColorJitter(strength, strength, 3 * strength)",
        TORCHVISION,
    ),
    # ---- CIFAR-10 ----
    Slip("CIFAR-10 in BGR", CIFAR10, ".reshape(-1, *IMAGE_SHAPE)", ".reshape(-1, *IMAGE_SHAPE).flip(1)", RECORDS),
    Slip("CIFAR-10 transposed", CIFAR10, ".reshape(-1, *IMAGE_SHAPE)", ".reshape(-1, *IMAGE_SHAPE).mT", RECORDS),
    Slip("Python's CIFAR-10 transposed", CIFAR10, "transpose(0, 3, 1, 2)", "transpose(0, 3, 2, 1)", PYTHON),
    Slip("two names of CIFAR-10 swapped", CIFAR10, '"cat", "deer", "dog"', '"dog", "deer", "cat"', PYTHON),
    Slip(
        "red and blue of CIFAR-10's mean swapped",
        CIFAR10,
        "(0.4914, 0.4822, 0.4465)",
        "(0.4465, 0.4822, 0.4914)",
        NORMALISED,
    ),
    Slip(
        "normalised by deviations of values up to 1",
        BATCHES,
        "self._of_channels(self.normalization[1])",
        "self._of_channels(self.normalization[1]) / 255",
        NORMALISED,
    ),
    Slip(
        "all channels normalised by the first",
        BATCHES,
        "return torch.tensor(values, device=self.device)",
        "return torch.tensor(values[:1] * 3, device=self.device)",
        NORMALISED,
    ),
    Slip(
        "MEAN of the config not taken", BATCHES, 'config.setdefault("MEAN", self.usual[0])', "self.usual[0]", NORMALISED
    ),
    Slip("enlarged by the nearest pixel", CIFAR10, 'mode="bilinear", antialias=True', 'mode="nearest"', ENLARGED),
    Slip("columns shifted as rows", CIFAR10, "columns = shifts[:, 1:]", "columns = shifts[:, :1]", SHIFTED),
    Slip(
        "copies of a CIFAR-10 image shifted alike",
        CIFAR10,
        "shifts[indices], mirrored[indices]",
        "shifts[indices % len(self.labels)], mirrored[indices % len(self.labels)]",
        COPIES,
    ),
    Slip(
        "CIFAR-10 shifted alike in all epochs", CIFAR10, "generator(-1 - self.sampler.epoch)", "generator(-1)", SHIFTED
    ),
    # ---- Class folders ----
    Slip("copies of a file cropped alike", FOLDER, "maps[indices]", "maps[which]", COPIES),
    Slip("files cropped alike in all epochs", FOLDER, "generator(-1 - epoch)", "generator(-1)", EPOCHS),
    Slip(
        "aspects of class folders uniform",
        FOLDER,
        "uniform_(*map(math.log, CROP_ASPECT), generator=generator)",
        "uniform_(*CROP_ASPECT, generator=generator).log()",
        CROPS,
    ),
    Slip("aspects of class folders squared", FOLDER, "(log_ratio / 2).exp()", "log_ratio.exp()", CROPS),
    Slip(
        "wide crops of class folders high",
        FOLDER,
        "for side in (stretch, 1 / stretch)",
        "for side in (1 / stretch, stretch)",
        CROPS,
    ),
    Slip(
        "class folders cropped on the diagonal",
        FOLDER,
        "left * (1 - width), top * (1 - height)",
        "left * (1 - width), left * (1 - height)",
        CROPS,
    ),
    Slip("class folders mirrored more often", FOLDER, "< 0.5) & flip", "< 0.6) & flip", CROPS),
    Slip(
        "class folders in BGR",
        FOLDER,
        "images.permute(0, 3, 1, 2).float()",
        "images.permute(0, 3, 1, 2).flip(1).float()",
        EPOCHS,
    ),
    Slip(
        "decoded by the nearest pixel",
        CLASS_IMAGES,
        "size, antialias=True)",
        "size, v2.InterpolationMode.NEAREST)",
        DECODED,
    ),
    Slip(
        "decoded without antialiasing",
        CLASS_IMAGES,
        "resize(trim(read_rgb(path)), size, antialias=True)",
        "to_pil_image(v2.functional.resize(v2.functional.pil_to_tensor(read_rgb(path)), size, antialias=False))",
        DECODED,
    ),
    Slip(
        "another split",
        "vit_caltech101_amp/caltech101.py",
        "TRAIN_FRACTION, SPLIT_SEED = 0.8, 0",
        "TRAIN_FRACTION, SPLIT_SEED = 0.8, 1",
        SPLIT,
    ),
    Slip(
        "files turned the wrong way",
        DECODING,
        "image = image.transpose(turn)",
        "image = image.transpose(turn).transpose(Image.Transpose.ROTATE_180)",
        DECODED,
    ),
    Slip("EXIF orientation left out", DECODING, "image = image.transpose(turn)", "image = image.copy()", DECODED),
    Slip("16 bits cut off", DECODING, "(255 / WHITE_16_BITS) + 0.5", "(255 / WHITE_16_BITS)", GREY),
    Slip("16 bits divided by 256", DECODING, "value * (255 / WHITE_16_BITS) + 0.5", "value / 256", GREY),
    Slip("what is transparent becomes black", DECODING, '"white")', '"black")', WHITE),
    # ---- Sampling ----
    Slip(
        "seed 1's second epoch is seed 2's first", SAMPLERS, "self.seed * 1_000_003 + epoch", "self.seed + epoch", ORDER
    ),
    Slip(
        "images of a window in order",
        SAMPLERS,
        "samples[torch.randperm(len(samples), generator=generator)]",
        "samples",
        ORDER,
    ),
    Slip(
        "shards in order",
        SAMPLERS,
        "torch.randperm(len(shards), generator=generator).split",
        "torch.arange(len(shards)).split",
        ORDER,
    ),
    Slip(
        "ranks take turns by image in an evaluation",
        SAMPLERS,
        "indices.view(-1, self.num_ranks, self.batch_size)[:, self.rank]",
        "indices.view(-1, self.batch_size, self.num_ranks)[..., self.rank]",
        EVALUATED,
    ),
    Slip(
        "the last images of an evaluation left out",
        SAMPLERS,
        "-(-self.num_samples // (self.batch_size * self.num_ranks))",
        "max(1, self.num_samples // (self.batch_size * self.num_ranks))",
        EVALUATED,
    ),
    Slip("a newer batch first", BATCHES, "first, future = reading.popleft()", "first, future = reading.pop()", AHEAD),
    Slip(
        "random images of seed 0",
        BATCHES,
        "torch.Generator().manual_seed(config.SEED)",
        "torch.Generator().manual_seed(0)",
        RANDOM,
    ),
    # ---- Mixing ----
    Slip(
        "boxes with rows for columns",
        MIXING,
        "np.stack([low[0], high[0], low[1], high[1]], 1)",
        "np.stack([low[1], high[1], low[0], high[0]], 1)",
        TIMMS,
    ),
    Slip("targets of the share that was asked for", MIXING, "1 - area / img_size**2", "share", TIMMS),
    Slip(
        "share and rest swapped",
        MIXING,
        "images = partners.lerp(images, blend",
        "images = images.lerp(partners, blend",
        TIMMS,
    ),
    Slip(
        "partners of a half batch away",
        MIXING,
        "batch.unflatten(0, (-1, 2)).flip(1)",
        "batch.unflatten(0, (2, -1)).flip(0)",
        TIMMS,
    ),
    Slip(
        "Beta distribution of one parameter",
        MIXING,
        "generator.beta(alpha or 1.0, alpha or 1.0, count)",
        "generator.beta(alpha or 1.0, 1.0, count)",
        TIMMS,
    ),
    Slip(
        "batches mixed alike in all epochs",
        MIXING,
        "(self.config.SEED, epoch, step)",
        "(self.config.SEED, 0, step)",
        MIXED,
    ),
    Slip("batches mixed alike for all seeds", MIXING, "(self.config.SEED, epoch, step)", "(epoch, step)", MIXED),
    Slip(
        "mixing drawn for each micro-batch",
        MIXING,
        "(self.config.SEED, epoch, step)",
        "(self.config.SEED, epoch, micro_batch)",
        MIXED,
    ),
    Slip(
        "mixing without the replica",
        MIXING,
        "(part * self.num_ranks + self.rank) * size",
        "part * self.num_ranks * size",
        MIXED,
    ),
    Slip(
        "mixing with the reversed batch",
        MIXING,
        "return batch.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)",
        "return batch.flip(0)",
        TIMMS,
    ),
    Slip(
        "labels of later stages not mixed",
        MIXING,
        "    if images.ndim == 1:\n        return images, targets",
        "    if images.ndim == 1:\n        return images, _swap(targets)",
        LATER,
    ),
    # ---- Packing ----
    Slip("packed by the nearest pixel", FILES, "Image.Resampling.BICUBIC", "Image.Resampling.NEAREST", RESIZED),
    Slip("packed at another quality", FILES, "quality=quality or QUALITY", "quality=QUALITY", RESIZED),
    Slip("packed on its side", FILES, "image = to_rgb(image)", 'image = image.convert("RGB")', ANY_KIND),
    Slip("CRCs without their constant", TFRECORD, "+ 0xA282EAD8", "+ 0xA282EAD0", THEIRS),
    Slip(
        "packed integers of the first byte",
        TFRECORD,
        "bytes([number & 0x7F | 0x80])",
        "bytes([number & 0x7F])",
        SAME_BYTES,
    ),
    Slip("labels without a sign", TFRECORD, "yield number - (number >> 63 << 64)", "yield number", PARSED),
    # ---- Samples ----
    Slip("digits upside down", DIGITS, "for image in grey]", "for image in grey[:, ::-1]]", SCANNED),
    Slip("digits too dark", DIGITS, "(255 / 16)", "(250 / 16)", SCANNED),
    Slip(
        "Fashion-MNIST transposed",
        FASHION,
        "offset=values).reshape(shape)",
        "offset=values).reshape(shape).T",
        FASHIONABLE,
    ),
    # ---- Predictions and exports ----
    Slip(
        "red and blue of a photograph swapped",
        EXPORT,
        "transform(trim(read_rgb(path)))",
        "transform(trim(read_rgb(path))).flip(0)",
        PHOTOGRAPH,
    ),
    Slip(
        "a photograph on its side",
        EXPORT,
        "trim(read_rgb(path))",
        '__import__("PIL.Image").Image.open(path).convert("RGB")',
        PHOTOGRAPH,
    ),
    Slip(
        "names of classes shifted",
        PREDICT,
        "[names[label] for label in labels]",
        "[names[label - 1] for label in labels]",
        PHOTOGRAPH,
    ),
    Slip("the nearest pixel exported", EXPORT, 'interpolation="bilinear"', 'interpolation="nearest"', EXPORTED),
    Slip("mean and deviation exported swapped", EXPORT, "mean, std = state.get", "std, mean = state.get", EXPORTED),
    Slip("squashed as exported", EXPORT, 'crop_mode="center"', 'crop_mode="squash"', EXPORTED),
    Slip(
        "EVAL_CROP not exported",
        EXPORT,
        'if images == "ImageNet" else crop_pct',
        'if images == "imagenet" else crop_pct',
        OF_IMAGENET,
    ),
]
