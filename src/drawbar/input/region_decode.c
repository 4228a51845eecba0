/* From a JPEG to one training sample: the window's pixels decoded, resized and flipped in one call.
 *
 * Against a decoder of whole images it skips the inverse DCT, upsampling and colour conversion of what lies outside the
 * window, and the entropy decoding of what lies below it; it can decode at 1/2, 1/4 or 1/8 of the size. TurboJPEG 3 has
 * the first and the last as tj3SetCroppingRegion and tj3SetScalingFactor, but no wheel carries it, and it reads every
 * image to its end. The scanline interface used here is in every libjpeg-turbo since 1.5.
 *
 * A plain shared library for ctypes, which lets go of the GIL: it knows nothing of Python. It links with no libjpeg but
 * opens one at run time, as that of Pillow's wheel is newer than most systems'; libjpeg itself refuses a caller whose
 * structures differ from its own. One `decoder` belongs to one thread.
 */
#define _GNU_SOURCE /* dladdr */
#include <dlfcn.h>
#include <math.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>

#include "huffman.h"

#define EXPORT __attribute__((visibility("default")))
#define PIXEL 3 /* bytes: RGB */
#if defined(__x86_64__) && defined(__GLIBC__)
#include <immintrin.h>
#define WITH_AVX2 __attribute__((target_clones("avx2", "default")))
#define WITH_SSSE3 __attribute__((target("ssse3")))
#else
#define WITH_AVX2
#endif

/* Options of decoding; without any it is exact. */
enum { FAST_DCT = 1, FAST_UPSAMPLING = 2, SCALED_DCT = 4, LIBJPEG_HUFFMAN = 8, WHOLE = 16 };

typedef struct {
    struct jpeg_error_mgr *(*std_error)(struct jpeg_error_mgr *);
    void (*create)(j_decompress_ptr, int, size_t);
    void (*source)(j_decompress_ptr, const unsigned char *, unsigned long);
    int (*header)(j_decompress_ptr, boolean);
    boolean (*start)(j_decompress_ptr);
    void (*crop)(j_decompress_ptr, JDIMENSION *, JDIMENSION *);
    JDIMENSION (*skip)(j_decompress_ptr, JDIMENSION);
    JDIMENSION (*read)(j_decompress_ptr, JSAMPARRAY, JDIMENSION);
    void (*abort)(j_decompress_ptr);
    void (*destroy)(j_decompress_ptr);
} library;

typedef struct {
    unsigned char *bytes;
    size_t size;
} buffer;

typedef struct {
    struct jpeg_decompress_struct jpeg; /* first, so that libjpeg's pointer to it is one to the decoder */
    struct jpeg_error_mgr errors;
    jmp_buf escape;
    library calls;
    void *handle;
    huffman_reader huffman;
    buffer pixels, lines;
    int warned;
    char message[JMSG_LENGTH_MAX];
} decoder;

typedef struct {
    int32_t width, height, components;
} image_size;

typedef struct {
    int32_t top, left, height, width; /* pixels */
} window;

typedef struct {
    double top, left, height, width; /* pixels, not always whole ones */
} view;

static int grow(buffer *room, size_t size) {
    if (room->size >= size) return 1;
    unsigned char *bytes = realloc(room->bytes, size);
    if (!bytes) return 0;
    room->bytes = bytes;
    room->size = size;
    return 1;
}

/* Resizing: bilinear between the centres of pixels, without smoothing, weights of 7 bits. -------------------------- */

enum { WEIGHT_BITS = 7, ONE = 1 << WEIGHT_BITS, LINE_PADDING = 16 };

typedef struct {
    int32_t first; /* pixel before the wanted point */
    int32_t next;  /* and the one behind it, as far as it may be read */
    int16_t weight; /* of `next` */
} tap;

static tap tap_at(double position, int32_t low, int32_t high) {
    if (position < low) position = low;
    if (position > high - 1) position = high - 1;
    int32_t first = (int32_t)floor(position);
    tap found = {first, first + 1 < high ? first + 1 : first, (int16_t)lrint((position - first) * ONE)};
    return found;
}

WITH_AVX2 static void blend_rows(const unsigned char *restrict upper, const unsigned char *restrict lower,
                                 int16_t weight, int16_t *restrict line, int32_t count) {
    int16_t rest = (int16_t)(ONE - weight);
    for (int32_t i = 0; i < count; i++) line[i] = (int16_t)(upper[i] * rest + lower[i] * weight);
}

/* Where in a line an output pixel lies, and the weights of its two pixels, channel by channel. */
typedef struct {
    int16_t weights[8];
    int32_t offset;
    int32_t padding[3];
} column;

static void blend_columns(const int16_t *line, const column *columns, int32_t count, unsigned char *out) {
    const int half = 1 << (2 * WEIGHT_BITS - 1);
    for (int32_t x = 0; x < count; x++) {
        const int16_t *at = line + columns[x].offset;
        int rest = columns[x].weights[0], weight = columns[x].weights[1];
        for (int c = 0; c < PIXEL; c++)
            out[x * PIXEL + c] = (unsigned char)((at[c] * rest + at[c + PIXEL] * weight + half) >> (2 * WEIGHT_BITS));
    }
}

#ifdef WITH_SSSE3
WITH_SSSE3 static inline __m128i one_column(const int16_t *line, const column *at) {
    const __m128i pairs = _mm_setr_epi8(0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11, -1, -1, -1, -1);
    __m128i two = _mm_loadu_si128((const __m128i *)(const void *)(line + at->offset));
    __m128i sum = _mm_madd_epi16(_mm_shuffle_epi8(two, pairs), _mm_load_si128((const __m128i *)(const void *)at));
    return _mm_srli_epi32(_mm_add_epi32(sum, _mm_set1_epi32(1 << (2 * WEIGHT_BITS - 1))), 2 * WEIGHT_BITS);
}

/* The same numbers as `blend_columns`, four pixels at a time; writes no byte behind the last pixel. */
WITH_SSSE3 static void blend_columns_ssse3(const int16_t *line, const column *columns, int32_t count,
                                           unsigned char *out) {
    const __m128i close_up = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    int32_t x = 0;
    for (; x + 6 <= count; x += 4) { /* 16 bytes are written for 12: the next pixels are set later */
        __m128i low = _mm_packs_epi32(one_column(line, columns + x), one_column(line, columns + x + 1));
        __m128i high = _mm_packs_epi32(one_column(line, columns + x + 2), one_column(line, columns + x + 3));
        __m128i four = _mm_shuffle_epi8(_mm_packus_epi16(low, high), close_up);
        _mm_storeu_si128((__m128i *)(void *)(out + x * PIXEL), four);
    }
    blend_columns(line, columns + x, count - x, out + x * PIXEL);
}
#endif

/* Makes `out`, height x width, of what `shown` covers, looking at no pixel outside of `readable`; both are places in
 * the image whose first row is at `bytes`. 0, or -1 without memory. `portable` leaves out instructions that not every
 * processor has; the numbers are the same. */
static int resize(buffer *room, const unsigned char *bytes, size_t row_bytes, const window *readable, const view *shown,
                  unsigned char *out, int32_t height, int32_t width, int flip, int portable) {
    int32_t samples = readable->width * PIXEL;
    size_t line_bytes = ((size_t)samples + PIXEL + LINE_PADDING) * sizeof(int16_t);
    size_t columns_bytes = (size_t)width * sizeof(column);
    if (!grow(room, columns_bytes + line_bytes + 16)) return -1;
    uintptr_t aligned = ((uintptr_t)room->bytes + 15) & ~(uintptr_t)15;
    column *columns = (column *)aligned;
    int16_t *line = (int16_t *)(aligned + columns_bytes);
    memset(line, 0, line_bytes);

    for (int32_t x = 0; x < width; x++) {
        double position = shown->left + (x + 0.5) * shown->width / width - 0.5;
        tap at = tap_at(position, readable->left, readable->left + readable->width);
        column *to = columns + (flip ? width - 1 - x : x);
        memset(to, 0, sizeof *to);
        for (int c = 0; c < PIXEL; c++) {
            to->weights[2 * c] = (int16_t)(ONE - at.weight);
            to->weights[2 * c + 1] = at.next == at.first ? 0 : at.weight;
        }
        to->offset = (at.first - readable->left) * PIXEL;
    }
    void (*blend)(const int16_t *, const column *, int32_t, unsigned char *) = blend_columns;
#ifdef WITH_SSSE3
    if (!portable && __builtin_cpu_supports("ssse3")) blend = blend_columns_ssse3;
#else
    (void)portable;
#endif
    const unsigned char *corner = bytes + (size_t)readable->left * PIXEL;
    for (int32_t y = 0; y < height; y++) {
        double position = shown->top + (y + 0.5) * shown->height / height - 0.5;
        tap at = tap_at(position, readable->top, readable->top + readable->height);
        const unsigned char *upper = corner + row_bytes * (size_t)at.first;
        blend_rows(upper, upper + (at.next > at.first ? row_bytes : 0), at.weight, line, samples);
        blend(line, columns, width, out + (size_t)y * (size_t)width * PIXEL);
    }
    return 0;
}

/* `resize` of RGB rows in memory. */
EXPORT int drawbar_resize(const unsigned char *bytes, size_t row_bytes, const window *readable, const view *shown,
                          unsigned char *out, int32_t height, int32_t width, int flip, int portable) {
    buffer room = {NULL, 0};
    int done = resize(&room, bytes, row_bytes, readable, shown, out, height, width, flip, portable);
    free(room.bytes);
    return done;
}

/* Decoding --------------------------------------------------------------------------------------------------------- */

static void on_error(j_common_ptr jpeg) {
    decoder *self = (decoder *)jpeg;
    jpeg->err->format_message(jpeg, self->message);
    longjmp(self->escape, 1);
}

/* A warning means damaged image data: pixels that were made up. The first is kept; trace messages have a level >= 0. */
static void on_message(j_common_ptr jpeg, int level) {
    decoder *self = (decoder *)jpeg;
    if (level < 0 && !self->warned) {
        self->warned = 1;
        jpeg->err->format_message(jpeg, self->message);
    }
}

static void on_output(j_common_ptr jpeg) { (void)jpeg; }

static void on_damage(j_decompress_ptr jpeg, const char *why) {
    decoder *self = (decoder *)jpeg;
    snprintf(self->message, sizeof self->message, "%s", why);
    longjmp(self->escape, 1);
}

static int resolve(void *handle, library *calls) {
    const struct {
        const char *name;
        void *slot;
    } wanted[] = {
        {"jpeg_std_error", &calls->std_error},    {"jpeg_CreateDecompress", &calls->create},
        {"jpeg_mem_src", &calls->source},         {"jpeg_read_header", &calls->header},
        {"jpeg_start_decompress", &calls->start}, {"jpeg_crop_scanline", &calls->crop},
        {"jpeg_skip_scanlines", &calls->skip},    {"jpeg_read_scanlines", &calls->read},
        {"jpeg_abort_decompress", &calls->abort}, {"jpeg_destroy_decompress", &calls->destroy},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *found = dlsym(handle, wanted[i].name);
        if (!found) return 0;
        memcpy(wanted[i].slot, &found, sizeof found);
    }
    return 1;
}

EXPORT void drawbar_jpeg_free(decoder *self) {
    self->calls.destroy(&self->jpeg);
    huffman_free(&self->huffman);
    free(self->pixels.bytes);
    free(self->lines.bytes);
    dlclose(self->handle);
    free(self);
}

/* A decoder that uses the libjpeg-turbo at `path`; NULL, and why in `message`, JMSG_LENGTH_MAX (200) bytes. */
EXPORT decoder *drawbar_jpeg_new(const char *path, char *message) {
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        snprintf(message, JMSG_LENGTH_MAX, "%s", dlerror());
        return NULL;
    }
    decoder *self = calloc(1, sizeof *self);
    if (!self || !resolve(handle, &self->calls)) {
        snprintf(message, JMSG_LENGTH_MAX, "%s", self ? "no libjpeg-turbo of version 1.5 or later" : "out of memory");
        free(self);
        dlclose(handle);
        return NULL;
    }
    self->handle = handle;
    self->jpeg.err = self->calls.std_error(&self->errors);
    self->errors.error_exit = on_error;
    self->errors.emit_message = on_message;
    self->errors.output_message = on_output;
    self->huffman.fail = on_damage;
    if (setjmp(self->escape)) {
        snprintf(message, JMSG_LENGTH_MAX, "%s", self->message);
        free(self);
        dlclose(handle);
        return NULL;
    }
    self->calls.create(&self->jpeg, JPEG_LIB_VERSION, sizeof self->jpeg);
    return self;
}

/* Changes with every change of the functions below: Drawbar takes no library that it was not written for. */
EXPORT int drawbar_jpeg_interface(void) { return 2; }

/* File of the libjpeg-turbo in use. */
EXPORT const char *drawbar_jpeg_path(const decoder *self) {
    Dl_info found;
    void *address;
    memcpy(&address, &self->calls.create, sizeof address);
    return dladdr(address, &found) ? found.dli_fname : "";
}

/* Why the last call of this decoder failed. */
EXPORT const char *drawbar_jpeg_message(const decoder *self) { return self->message; }

/* Reads the header of `data`, which must stay where it is until its window is decoded. 0; -1: no JPEG. */
EXPORT int drawbar_jpeg_header(decoder *self, const unsigned char *data, size_t bytes, image_size *size) {
    self->warned = 0;
    if (setjmp(self->escape)) {
        self->calls.abort(&self->jpeg);
        return -1;
    }
    self->calls.abort(&self->jpeg); /* whatever an earlier image has left */
    self->calls.source(&self->jpeg, data, (unsigned long)bytes);
    self->calls.header(&self->jpeg, TRUE);
    size->width = (int32_t)self->jpeg.image_width;
    size->height = (int32_t)self->jpeg.image_height;
    size->components = self->jpeg.num_components;
    return 0;
}

/* The window, at 1/`scale` of its size, into `self->pixels`. libjpeg starts and ends at columns of its own choice:
 * `got` says which part of the scaled image the rows hold. The caller has set `escape`. */
static int decode(decoder *self, const window *wanted, int32_t scale, int options, window *got) {
    j_decompress_ptr jpeg = &self->jpeg;
    jpeg->out_color_space = JCS_RGB;
    jpeg->dct_method = options & FAST_DCT ? JDCT_IFAST : JDCT_ISLOW;
    jpeg->do_fancy_upsampling = options & FAST_UPSAMPLING ? FALSE : TRUE;
    jpeg->scale_num = 1;
    jpeg->scale_denom = (unsigned int)scale;
    self->calls.start(jpeg);
    if (!(options & LIBJPEG_HUFFMAN)) huffman_take_over(&self->huffman, jpeg);

    int32_t top = wanted->top / scale, bottom = (wanted->top + wanted->height + scale - 1) / scale;
    int32_t left = wanted->left / scale, right = (wanted->left + wanted->width + scale - 1) / scale;
    /* Smooth upsampling looks at the neighbours: with a margin the edge is that of the whole image. */
    int32_t margin = options & FAST_UPSAMPLING ? 0 : 16;
    left = left > margin ? left - margin : 0;
    right = right + margin < (int32_t)jpeg->output_width ? right + margin : (int32_t)jpeg->output_width;
    JDIMENSION first = (JDIMENSION)left, width = (JDIMENSION)(right - left);
    if (width < jpeg->output_width) self->calls.crop(jpeg, &first, &width);

    size_t row_bytes = (size_t)width * PIXEL;
    if (!grow(&self->pixels, row_bytes * (size_t)(bottom - top))) {
        snprintf(self->message, sizeof self->message, "out of memory");
        longjmp(self->escape, 1);
    }
    if (top) self->calls.skip(jpeg, (JDIMENSION)top);
    for (int32_t row = top; row < bottom;) {
        JSAMPROW rows[8];
        JDIMENSION count = 0;
        for (; count < 8 && row + (int32_t)count < bottom; count++)
            rows[count] = self->pixels.bytes + row_bytes * (size_t)(row + (int32_t)count - top);
        row += (int32_t)self->calls.read(jpeg, rows, count);
    }
    self->calls.abort(jpeg); /* not finish: what lies below is not needed */
    *got = (window){top, (int32_t)first, bottom - top, (int32_t)width};
    return self->warned ? -1 : 0;
}

/* Decodes a window of the image whose header was read last into `out`, tight rows of RGB. 0; -1: damaged. */
EXPORT int drawbar_jpeg_window(decoder *self, const window *wanted, int options, unsigned char *out) {
    if (setjmp(self->escape)) {
        self->calls.abort(&self->jpeg);
        return -1;
    }
    window got;
    if (decode(self, wanted, 1, options, &got)) return -1;
    size_t row_bytes = (size_t)wanted->width * PIXEL;
    const unsigned char *from = self->pixels.bytes + (size_t)(wanted->left - got.left) * PIXEL;
    for (int32_t row = 0; row < wanted->height; row++)
        memcpy(out + row_bytes * (size_t)row, from + (size_t)got.width * PIXEL * (size_t)row, row_bytes);
    return 0;
}

/* Decodes `readable` of that image and makes `out`, height x width RGB, of what `shown` covers: bilinear, no smoothing,
 * flipped left to right where `flip` says so. 0; -1: damaged. */
EXPORT int drawbar_jpeg_sample(decoder *self, const window *readable, const view *shown, int options,
                               unsigned char *out, int32_t height, int32_t width, int flip) {
    if (setjmp(self->escape)) {
        self->calls.abort(&self->jpeg);
        return -1;
    }
    int32_t scale = 1;
    if (options & SCALED_DCT)
        while (scale < 8 && shown->width >= 2. * scale * width && shown->height >= 2. * scale * height) scale *= 2;
    window got, whole = {0, 0, (int32_t)self->jpeg.image_height, (int32_t)self->jpeg.image_width};
    if (decode(self, options & WHOLE ? &whole : readable, scale, options, &got)) return -1;

    /* Both places in the rows that were got: more columns and rows may be there on all sides. */
    int32_t left = readable->left / scale - got.left, top = readable->top / scale - got.top;
    int32_t right = (readable->left + readable->width + scale - 1) / scale - got.left;
    int32_t bottom = (readable->top + readable->height + scale - 1) / scale - got.top;
    window within = {top, left, bottom - top, right - left};
    view scaled = {shown->top / scale - got.top, shown->left / scale - got.left, shown->height / scale,
                   shown->width / scale};
    size_t row_bytes = (size_t)got.width * PIXEL;
    if (resize(&self->lines, self->pixels.bytes, row_bytes, &within, &scaled, out, height, width, flip, 0)) {
        snprintf(self->message, sizeof self->message, "out of memory");
        return -1;
    }
    return 0;
}
