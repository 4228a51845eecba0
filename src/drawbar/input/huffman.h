/* Decoding of the Huffman-coded data of baseline JPEGs, in the place of libjpeg's own; see huffman.c. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <jpeglib.h>

enum { LOOK_BITS = 10, LONGEST_CODE = 16 };

/* One of a file's tables, ready for use; kept for the next file, which mostly has the same. */
typedef struct {
    JHUFF_TBL source;
    int32_t first_beyond[LONGEST_CODE + 1]; /* of codes of each length, left-aligned to 16 bits */
    int32_t symbol_offset[LONGEST_CODE + 1];
    uint32_t look[1 << LOOK_BITS];
    int is_made;
} huffman_table;

typedef struct {
    huffman_table dc[NUM_HUFF_TBLS], ac[NUM_HUFF_TBLS];
    const unsigned char *next, *end; /* of the file, behind what is in `segment` */
    unsigned char *segment;          /* up to the next marker, stuffing taken out, zeros behind */
    size_t segment_room;
    const unsigned char *at, *segment_end;
    uint64_t bits; /* the next ones, left-aligned */
    int num_bits;
    int32_t last_dc[MAX_COMPS_IN_SCAN];
    unsigned restarts_to_go, next_restart;
    void *expected[3]; /* functions of libjpeg that were found where they should be */
    void (*fail)(j_decompress_ptr, const char *); /* does not return */
} huffman_reader;

/* To be called between jpeg_start_decompress and the first row: from then on `reader` decodes this image, if it is of a
 * kind that it knows and libjpeg is built as expected; else libjpeg does. `fail` is told of damaged data. */
void huffman_take_over(huffman_reader *reader, j_decompress_ptr jpeg);

void huffman_free(huffman_reader *reader);
