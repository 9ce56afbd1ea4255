/* From the bytes of a JPEG, or from pixels, to the square uint8 example, in one pass over the rows.

Only the rectangle that an example needs is decoded, and every decoded row is added at once to the
few output rows that it touches. The arithmetic is that of vitscale/data/resample.py, operation by
operation: multiplications and additions of floats in one order, never fused or reassociated, so
that both give the same bits on every processor. The GIL is released while pixels are worked on.

Legend: H W rows and columns of the picture, S side of the example in px. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <limits.h>
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>

#include <jerror.h>

#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2000000
#error "libjpeg-turbo 2.0 or newer is needed: jpeg_crop_scanline and jpeg_skip_scanlines"
#endif

/* Vectors of 8 floats where the processor has them; the results are the same without. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define WIDEST __attribute__((target_clones("avx2", "default")))
#else
#define WIDEST
#endif
#define INLINED static inline __attribute__((always_inline))

/* Rows that libjpeg is asked for at a time: an MCU row at most. */
#define ROWS 16
/* Columns decoded on either side of a rectangle. The outermost chroma sample of a cropped decode is
   treated as the picture's edge, and libjpeg upsamples smoothly from 3 chroma samples on only. */
#define MARGIN 8

/* ---- Weights -------------------------------------------------------------------------------- */

/* Which source places each output place is made of. */
typedef struct {
    int size;      /* Output places. */
    int width;     /* Weights kept of each place; those that are not used are 0. */
    int *start;    /* [size] First source place. */
    int *count;    /* [size] Source places. */
    float *weight; /* [size, width] They sum to 1. */
} Taps;

static void free_taps(Taps *taps)
{
    free(taps->start);
    free(taps->count);
    free(taps->weight);
}

/* Height over source place x of a triangle that reaches that far to both sides of its centre. */
static double height_at(int x, double centre, double reach)
{
    double height = 1.0 - fabs(x - centre + 0.5) / reach;
    return height > 0.0 ? height : 0.0;
}

/* The source places under the triangle of output place i; only first .. last - 1 are there. */
static void find_places(Taps *taps, int i, double centre, double reach, int first, int last)
{
    int start = (int)(centre - reach + 0.5), end = (int)(centre + reach + 0.5);
    start = start > first ? start : first;
    end = end < last ? end : last;
    taps->start[i] = start;
    taps->count[i] = end - start;
}

/* Interpolate between two neighbours: the centre of place x is at x + 0.5. */
static void weigh_nearest(Taps *taps, int i, double centre, int first, int last)
{
    double place = centre - 0.5 > first ? centre - 0.5 : first;
    int start = (int)place < last - 1 ? (int)place : last - 1;
    double rest = start < last - 1 ? place - start : 0.0;
    taps->start[i] = start;
    taps->count[i] = start < last - 1 ? 2 : 1;
    taps->weight[2 * i] = (float)(1.0 - rest);
    taps->weight[2 * i + 1] = (float)rest;
}

/* Average under the triangle. */
static void weigh_all(Taps *taps, int i, double centre, double reach)
{
    float *weight = taps->weight + (size_t)i * taps->width;
    double sum = 0.0;
    for (int t = 0; t < taps->count[i]; t++)
        sum += height_at(taps->start[i] + t, centre, reach);
    for (int t = 0; t < taps->count[i]; t++)
        weight[t] = (float)(height_at(taps->start[i] + t, centre, reach) / sum);
}

/* Weigh the source places first .. last - 1 for `size` places laid evenly over the stretch that
   starts at `from` and is `length` long. Returns 0 if memory is short. */
static int make_taps(Taps *taps, double from, double length, int first, int last, int size,
                     int antialias)
{
    double scale = length / size, reach = scale > 1.0 ? scale : 1.0;
    taps->size = size;
    taps->width = antialias ? 1 : 2;
    taps->start = malloc(size * sizeof(int));
    taps->count = malloc(size * sizeof(int));
    if (!taps->start || !taps->count)
        return 0;
    for (int i = 0; antialias && i < size; i++) {
        find_places(taps, i, from + (i + 0.5) * scale, reach, first, last);
        taps->width = taps->count[i] > taps->width ? taps->count[i] : taps->width;
    }
    taps->weight = calloc((size_t)size * taps->width, sizeof(float));
    if (!taps->weight)
        return 0;
    for (int i = 0; i < size; i++) {
        double centre = from + (i + 0.5) * scale;
        if (antialias)
            weigh_all(taps, i, centre, reach);
        else
            weigh_nearest(taps, i, centre, first, last);
        taps->start[i] -= first;
    }
    return 1;
}

/* ---- Resizing row by row -------------------------------------------------------------------- */

typedef struct {
    Taps down, across;
    int channels;   /* Of the rows that come: 1 or 3. */
    int planes;     /* Of the example: 1 or 3; a single channel is repeated. */
    int num_values; /* In one row: columns * channels. */
    int row;        /* Rows that came so far. */
    int next;       /* First output row that is not finished. */
    int ring;       /* Output rows that can be under way at one time. */
    size_t stride;  /* Floats from one row under way to the next. */
    float *sums;    /* [ring, stride] Rows under way. */
    float *quads;   /* [S, 4] A finished row of colours, its pixels four values apart. */
    uint8_t *bytes; /* [S, 4] Rounded. */
    uint8_t *out;   /* [planes, S, S] */
} Resize;

static void free_resize(Resize *job)
{
    free_taps(&job->down);
    free_taps(&job->across);
    free(job->sums);
    free(job->quads);
    free(job->bytes);
}

/* A rectangle of a picture, in places between pixels, and the whole pixels that it touches. */
typedef struct {
    double top, left, height, width;
    int row0, row1, column0, column1;
} Box;

/* Returns 0 if memory is short. */
static int start_resize(Resize *job, const Box *box, int channels, int planes, int size,
                        uint8_t *out, int flip, int antialias)
{
    memset(job, 0, sizeof *job);
    job->channels = channels;
    job->planes = planes;
    job->num_values = (box->column1 - box->column0) * channels;
    job->out = out;
    if (!make_taps(&job->down, box->top, box->height, box->row0, box->row1, size, antialias) ||
        !make_taps(&job->across, box->left, box->width, box->column0, box->column1, size,
                   antialias))
        return 0;
    Taps *across = &job->across, *down = &job->down;
    for (int i = 0; i < size; i++)
        across->start[i] *= channels;
    for (int i = 0, j = size - 1; flip && i < j; i++, j--) {
        int start = across->start[i];
        across->start[i] = across->start[j];
        across->start[j] = start;
        for (int t = 0; t < across->width; t++) {
            float *one = across->weight + (size_t)i * across->width + t;
            float *other = across->weight + (size_t)j * across->width + t, kept = *one;
            *one = *other;
            *other = kept;
        }
    }
    for (int i = 0, j = 0; i < size; i++) {
        while (j < size && down->start[j] < down->start[i] + down->count[i])
            j++;
        job->ring = j - i > job->ring ? j - i : job->ring;
    }
    /* Weights of 0 meet what lies behind a row: it must be finite, and stays 0. */
    job->stride = ((size_t)job->num_values + (size_t)across->width * channels + 4 + 15) & ~15u;
    job->sums = calloc(job->ring * job->stride, sizeof(float));
    job->quads = malloc((size_t)size * 4 * sizeof(float));
    job->bytes = malloc((size_t)size * 4);
    return job->sums && job->quads && job->bytes;
}

WIDEST static void first_row(float *restrict sums, const uint8_t *restrict row, float weight,
                             int num_values)
{
    for (int i = 0; i < num_values; i++)
        sums[i] = row[i] * weight;
}

WIDEST static void add_row(float *restrict sums, const uint8_t *restrict row, float weight,
                           int num_values)
{
    for (int i = 0; i < num_values; i++)
        sums[i] += row[i] * weight;
}

typedef float Four __attribute__((vector_size(16)));

INLINED Four four_at(const float *place)
{
    Four values;
    memcpy(&values, place, sizeof values);
    return values;
}

/* The three channels of a pixel and, in the fourth place, something that nobody looks at. */
INLINED void colour_pixels(const float *sums, const Taps *across, int width, float *quads)
{
    const float *weight = across->weight;
    for (int x = 0; x < across->size; x++, weight += width) {
        const float *pixel = sums + across->start[x];
        Four value = four_at(pixel) * weight[0];
        for (int t = 1; t < width; t++)
            value += four_at(pixel + 3 * t) * weight[t];
        memcpy(quads + 4 * x, &value, sizeof value);
    }
}

WIDEST static void colour_row(const float *sums, const Taps *across, float *restrict quads,
                              uint8_t *restrict bytes, uint8_t *restrict out, size_t plane)
{
    switch (across->width) { /* Loops of a known length are unrolled. */
    case 2: colour_pixels(sums, across, 2, quads); break;
    case 3: colour_pixels(sums, across, 3, quads); break;
    case 4: colour_pixels(sums, across, 4, quads); break;
    case 5: colour_pixels(sums, across, 5, quads); break;
    default: colour_pixels(sums, across, across->width, quads);
    }
    for (int i = 0; i < 4 * across->size; i++)
        bytes[i] = (uint8_t)(int)(quads[i] + 0.5f);
    uint8_t *restrict red = out, *restrict green = out + plane, *restrict blue = out + 2 * plane;
    for (int x = 0; x < across->size; x++) {
        red[x] = bytes[4 * x];
        green[x] = bytes[4 * x + 1];
        blue[x] = bytes[4 * x + 2];
    }
}

static void grey_row(const float *sums, const Taps *across, uint8_t *out)
{
    const float *weight = across->weight;
    for (int x = 0; x < across->size; x++, weight += across->width) {
        const float *pixel = sums + across->start[x];
        float value = pixel[0] * weight[0];
        for (int t = 1; t < across->width; t++)
            value += pixel[t] * weight[t];
        out[x] = (uint8_t)(value + 0.5f);
    }
}

static void finish_row(Resize *job, const float *sums, int k)
{
    size_t size = job->across.size, plane = size * size;
    uint8_t *out = job->out + k * size;
    if (job->channels == 3) {
        colour_row(sums, &job->across, job->quads, job->bytes, out, plane);
        return;
    }
    grey_row(sums, &job->across, out);
    for (int c = 1; c < job->planes; c++)
        memcpy(out + c * plane, out, size);
}

/* Take the next row of the rectangle, and finish the output rows that end with it. */
static void push_row(Resize *job, const uint8_t *pixels)
{
    const Taps *down = &job->down;
    int y = job->row++;
    for (int k = job->next; k < down->size && down->start[k] <= y; k++) {
        float *sums = job->sums + (k % job->ring) * job->stride;
        int t = y - down->start[k];
        float weight = down->weight[(size_t)k * down->width + t];
        (t ? add_row : first_row)(sums, pixels, weight, job->num_values);
    }
    while (job->next < down->size && down->start[job->next] + down->count[job->next] == y + 1) {
        int k = job->next++;
        finish_row(job, job->sums + (k % job->ring) * job->stride, k);
    }
}

/* ---- JPEG ----------------------------------------------------------------------------------- */

typedef struct {
    struct jpeg_decompress_struct jpeg;
    struct jpeg_error_mgr errors;
    jmp_buf back;
    int is_short_of_memory;
    char message[JMSG_LENGTH_MAX];
} Decoder;

static void stop(j_common_ptr jpeg)
{
    Decoder *decoder = (Decoder *)jpeg->client_data;
    decoder->is_short_of_memory = jpeg->err->msg_code == JERR_OUT_OF_MEMORY;
    jpeg->err->format_message(jpeg, decoder->message);
    longjmp(decoder->back, 1);
}

/* A warning that says that pixels are missing or made up is an error; odd headers are not. */
static void judge(j_common_ptr jpeg, int level)
{
    if (level >= 0)
        return;
    switch (jpeg->err->msg_code) {
    case JWRN_EXTRANEOUS_DATA:
        if (jpeg->err->msg_parm.i[1] == JPEG_EOI) /* Behind the last pixel. */
            return;
        stop(jpeg);
        break;
    case JWRN_ARITH_BAD_CODE:
    case JWRN_HIT_MARKER:
    case JWRN_HUFF_BAD_CODE:
    case JWRN_JPEG_EOF:
    case JWRN_MUST_RESYNC:
        stop(jpeg);
    }
}

static void say_nothing(j_common_ptr jpeg)
{
    (void)jpeg;
}

/* To be called inside setjmp(decoder->back); jpeg_destroy_decompress is due afterwards. */
static void read_header(Decoder *decoder, const Py_buffer *data)
{
    jpeg_create_decompress(&decoder->jpeg);
    jpeg_mem_src(&decoder->jpeg, data->buf, data->len);
    jpeg_save_markers(&decoder->jpeg, JPEG_APP0 + 1, 0xFFFF);
    jpeg_save_markers(&decoder->jpeg, JPEG_APP0 + 2, 0xFFFF);
    jpeg_read_header(&decoder->jpeg, TRUE);
}

static void start_decoder(Decoder *decoder)
{
    memset(decoder, 0, sizeof *decoder);
    decoder->jpeg.err = jpeg_std_error(&decoder->errors);
    decoder->jpeg.client_data = decoder;
    decoder->errors.error_exit = stop;
    decoder->errors.emit_message = judge;
    decoder->errors.output_message = say_nothing;
}

/* Whether libjpeg guesses at detail that a progressive file leaves out. How it does that depends on
   its version and on the blocks around, so that a part is not decoded as in the whole. */
static int is_smoothed(const struct jpeg_decompress_struct *jpeg)
{
    if (!jpeg->progressive_mode || !jpeg->coef_bits)
        return 0;
    for (int c = 0; c < jpeg->num_components; c++)
        for (int i = 0; i < 10; i++)
            if (jpeg->coef_bits[c][i] != 0)
                return 1;
    return 0;
}

/* Pillow's luminance. */
static void to_grey(uint8_t *pixels, int columns)
{
    for (int x = 0; x < columns; x++) {
        const uint8_t *rgb = pixels + 3 * x;
        pixels[x] = (rgb[0] * 19595u + rgb[1] * 38470u + rgb[2] * 7471u + 0x8000u) >> 16;
    }
}

/* What to make of the bytes, and the memory for it, which outlives a jump out of libjpeg. */
typedef struct {
    Decoder decoder;
    Resize resize;
    int eighths, planes, size, flip, antialias;
    double top, left, height, width; /* Of the rectangle at full size. */
    uint8_t *out;
    uint8_t *rows; /* [ROWS, decoded columns, channels] */
    int is_smoothed;     /* What came out: nothing is made of such a file, */
    const char *problem; /* or of arguments that make no sense. */
} Job;

static int clamped(double value, int most)
{
    return value < most ? (int)value : most;
}

/* The part of a picture of that size; 0 if it is not inside. */
static int set_box(Box *box, double top, double left, double height, double width, int rows,
                   int columns)
{
    *box = (Box){top, left, height, width, 0, 0, 0, 0};
    /* Written so that a NaN fails too. */
    if (!(top >= 0 && left >= 0 && height > 0 && width > 0 && top + height <= rows &&
          left + width <= columns))
        return 0;
    box->row0 = (int)top;
    box->column0 = (int)left;
    box->row1 = clamped(ceil(top + height), rows);
    box->column1 = clamped(ceil(left + width), columns);
    return 1;
}

static void decode(Job *job)
{
    struct jpeg_decompress_struct *jpeg = &job->decoder.jpeg;
    int num_channels = jpeg->num_components == 1 ? 1 : 3;
    jpeg->out_color_space = num_channels == 1 ? JCS_GRAYSCALE : JCS_RGB;
    jpeg->scale_num = job->eighths;
    jpeg->scale_denom = 8;
    jpeg_start_decompress(jpeg);
    job->is_smoothed = is_smoothed(jpeg);
    if (job->is_smoothed)
        return;

    Box box;
    double part = job->eighths / 8.0;
    if (!set_box(&box, job->top * part, job->left * part, job->height * part, job->width * part,
                 jpeg->output_height, jpeg->output_width)) {
        job->problem = "the rectangle is not inside the picture";
        return;
    }
    JDIMENSION left = box.column0 > MARGIN ? box.column0 - MARGIN : 0;
    JDIMENSION right = box.column1 + MARGIN;
    JDIMENSION columns = (right < jpeg->output_width ? right : jpeg->output_width) - left;
    if (columns < jpeg->output_width)
        jpeg_crop_scanline(jpeg, &left, &columns);
    size_t row_bytes = (size_t)columns * num_channels;
    int channels = num_channels < job->planes ? num_channels : job->planes;
    job->rows = malloc(row_bytes * ROWS);
    if (!job->rows || !start_resize(&job->resize, &box, channels, job->planes, job->size, job->out,
                                    job->flip, job->antialias)) {
        job->decoder.is_short_of_memory = 1;
        return;
    }
    JSAMPROW rows[ROWS];
    for (int i = 0; i < ROWS; i++)
        rows[i] = job->rows + i * row_bytes;
    if (box.row0 > 0)
        jpeg_skip_scanlines(jpeg, box.row0);
    while (job->resize.next < job->size && (int)jpeg->output_scanline < box.row1) {
        int rest = box.row1 - (int)jpeg->output_scanline;
        int got = jpeg_read_scanlines(jpeg, rows, rest < ROWS ? rest : ROWS);
        for (int i = 0; i < got; i++) {
            uint8_t *pixels = rows[i] + (box.column0 - (int)left) * num_channels;
            if (channels < num_channels)
                to_grey(pixels, box.column1 - box.column0);
            push_row(&job->resize, pixels);
        }
    }
}

/* Without the GIL. What has gone wrong is left in the job. */
static void run_job(Job *job, const Py_buffer *data)
{
    start_decoder(&job->decoder);
    if (setjmp(job->decoder.back) == 0) {
        read_header(&job->decoder, data);
        if (job->decoder.jpeg.num_components != 1 && job->decoder.jpeg.num_components != 3)
            job->problem = "only grey and colour JPEG files of 1 and 3 components are decoded";
        else
            decode(job);
    }
    jpeg_destroy_decompress(&job->decoder.jpeg);
    free_resize(&job->resize);
    free(job->rows);
}

/* ---- Python --------------------------------------------------------------------------------- */

static PyObject *failed(const Decoder *decoder, const char *problem)
{
    if (decoder->is_short_of_memory)
        return PyErr_NoMemory();
    PyErr_SetString(PyExc_ValueError, problem ? problem : decoder->message);
    return NULL;
}

/* Look at an array of bytes by [planes, side, side], or by [row, column, channel]. */
static int get_bytes(PyObject *array, Py_buffer *view, int is_out)
{
    int flags = PyBUF_ND | PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (is_out ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(array, view, flags))
        return 0;
    const Py_ssize_t *shape = view->shape;
    int is_right = view->ndim == 3 && view->itemsize == 1 && strcmp(view->format, "B") == 0 &&
                   shape[0] > 0 && shape[1] > 0 && shape[0] <= INT_MAX / 4 && shape[1] <= INT_MAX / 4;
    if (is_right) {
        Py_ssize_t channels = is_out ? shape[0] : shape[2];
        is_right = (channels == 1 || channels == 3) && (!is_out || shape[1] == shape[2]);
    }
    if (!is_right) {
        PyErr_SetString(PyExc_ValueError, is_out
                                              ? "out must be uint8 by [1 or 3, side, side]"
                                              : "pixels must be uint8 by [row, column, 1 or 3]");
        PyBuffer_Release(view);
    }
    return is_right;
}

PyDoc_STRVAR(header_doc, "header(data) -> (width, height, components, precision, segments)");

static PyObject *segments_of(const struct jpeg_decompress_struct *jpeg)
{
    PyObject *segments = PyList_New(0);
    for (jpeg_saved_marker_ptr at = jpeg->marker_list; segments && at; at = at->next) {
        PyObject *segment =
            Py_BuildValue("(iy#)", at->marker, at->data, (Py_ssize_t)at->data_length);
        if (!segment || PyList_Append(segments, segment))
            Py_CLEAR(segments);
        Py_XDECREF(segment);
    }
    return segments;
}

static PyObject *header(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer data;
    if (!PyArg_ParseTuple(args, "y*:header", &data))
        return NULL;
    Decoder decoder;
    PyObject *result = NULL;
    start_decoder(&decoder);
    if (setjmp(decoder.back) == 0) {
        read_header(&decoder, &data);
        struct jpeg_decompress_struct *jpeg = &decoder.jpeg;
        result = Py_BuildValue("(IIiiN)", jpeg->image_width, jpeg->image_height,
                               jpeg->num_components, jpeg->data_precision, segments_of(jpeg));
    } else {
        failed(&decoder, NULL);
    }
    jpeg_destroy_decompress(&decoder.jpeg);
    PyBuffer_Release(&data);
    return result;
}

PyDoc_STRVAR(example_doc,
             "example(data, eighths, top, left, height, width, out, flip, antialias)");

static PyObject *example(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer data, out;
    PyObject *array;
    Job *job = calloc(1, sizeof(Job));
    if (!job)
        return PyErr_NoMemory();
    if (!PyArg_ParseTuple(args, "y*iddddOpp:example", &data, &job->eighths, &job->top, &job->left,
                          &job->height, &job->width, &array, &job->flip, &job->antialias)) {
        free(job);
        return NULL;
    }
    PyObject *result = NULL;
    if (job->eighths < 1 || job->eighths > 8) {
        PyErr_SetString(PyExc_ValueError, "eighths must be 1 .. 8");
    } else if (get_bytes(array, &out, 1)) {
        job->planes = (int)out.shape[0];
        job->size = (int)out.shape[1];
        job->out = out.buf;
        Py_BEGIN_ALLOW_THREADS
        run_job(job, &data);
        Py_END_ALLOW_THREADS
        PyBuffer_Release(&out);
        if (job->problem || job->decoder.is_short_of_memory || job->decoder.message[0])
            failed(&job->decoder, job->problem);
        else
            result = PyBool_FromLong(!job->is_smoothed);
    }
    PyBuffer_Release(&data);
    free(job);
    return result;
}

PyDoc_STRVAR(resize_doc, "resize(pixels, top, left, height, width, out, flip, antialias)");

static PyObject *resize(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *source, *target;
    Py_buffer pixels, out;
    double top, left, height, width;
    int flip, antialias;
    if (!PyArg_ParseTuple(args, "OddddOpp:resize", &source, &top, &left, &height, &width, &target,
                          &flip, &antialias))
        return NULL;
    if (!get_bytes(source, &pixels, 0))
        return NULL;
    if (!get_bytes(target, &out, 1)) {
        PyBuffer_Release(&pixels);
        return NULL;
    }
    Box box;
    int channels = (int)pixels.shape[2], planes = (int)out.shape[0], is_started = 1;
    const char *problem = NULL;
    if (!set_box(&box, top, left, height, width, (int)pixels.shape[0], (int)pixels.shape[1]))
        problem = "the rectangle is not inside the picture";
    else if (channels != planes)
        problem = "pixels and out have different channels";
    if (!problem) {
        Py_BEGIN_ALLOW_THREADS
        Resize job;
        is_started = start_resize(&job, &box, channels, planes, (int)out.shape[1], out.buf, flip,
                                  antialias);
        for (int y = box.row0; is_started && y < box.row1; y++)
            push_row(&job, (uint8_t *)pixels.buf +
                               ((size_t)y * pixels.shape[1] + box.column0) * channels);
        free_resize(&job);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&pixels);
    PyBuffer_Release(&out);
    if (problem)
        PyErr_SetString(PyExc_ValueError, problem);
    else if (!is_started)
        PyErr_NoMemory();
    else
        return Py_NewRef(Py_None);
    return NULL;
}

static PyMethodDef functions[] = {
    {"header", header, METH_VARARGS, header_doc},
    {"example", example, METH_VARARGS, example_doc},
    {"resize", resize, METH_VARARGS, resize_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "vitscale.data._pixels", NULL, 0, functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__pixels(void)
{
    return PyModuleDef_Init(&definition);
}
