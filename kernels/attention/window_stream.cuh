// The work of one CTA of window_attention.cu, and the copies of the KV pool's keys and values into
// its shared memory.
#pragma once

#include "tensor_core.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int PIECE = 8, PIECES = HEAD_DIM / PIECE;  // elements of a piece, pieces of a row
#if CODES
typedef unsigned char Stored;  // what the pool has: E4M3 numbers
#else
typedef u16 Stored;
#endif
constexpr int STORED_PIECE = 16 / sizeof(Stored), STORED_PIECES = HEAD_DIM / STORED_PIECE;
constexpr int KEYS = 16, TILE = KEYS * STORED_PIECES;  // of a block; pieces of its keys or values
constexpr int ROWS = 16 * ROW_TILES;
constexpr int COPY_ROWS = 32 / STORED_PIECES, COPIES = KEYS / COPY_ROWS;  // rows of a warp's copy
constexpr int SUM_STRIDE = HEAD_DIM + 8;  // + 8: rows that are written together use different banks

// Writes zeros and does not read the source where `is_present` is false.
__device__ inline void copy_piece(uint4* destination, const Stored* source, bool is_present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"(shared_address(destination)), "l"(source), "r"(is_present ? 16 : 0) : "memory");
}

// Index of a piece in a tile, swizzled: the 8 rows that are read together use different banks.
__device__ inline int swizzled(int row, int piece) { return row * PIECES + (piece ^ row % 8); }
// The same of a tile as the pool stores it. With 4 pieces two rows share 128 bytes.
__device__ inline int stored_place(int row, int piece) {
    return row * STORED_PIECES + (piece ^ (STORED_PIECES < 8 ? row / 2 % 4 : row % 8));
}

// Same layout as _Arguments in window_attention_cuda.py.
struct Windows {
    const u16 *qkv, *cos_sin, *norm_weight;
    Stored *layer;
    u16 *out;
    const int *block_tables, *kv_lens, *offsets;  // offsets: null if windows have equal rows
    const i64 *kv_slots, *num_padding, *tree_bits;
    const float *sinks;
    float *partials, *log_sums;  // null if the splits of a tile form a cluster
    i64 value_offset;
    int table_stride, max_len, window, group, kv_heads, page_shift, tiles, splits, min_keys;
    int offset;  // keys of a tree's region before the window
    float scale, eps, inverse_key_scale, inverse_value_scale, value_scale;

    __device__ bool in_clusters() const { return partials == nullptr; }
    __device__ int heads() const { return kv_heads * group; }
    __device__ i64 token_stride() const { return static_cast<i64>(kv_heads) * HEAD_DIM; }
};

// The part of the windows that this CTA computes. Blocks have 16 keys that were in the pool before.
// Loads before griddepcontrol.wait bypass the L1 cache, which may hold stale data of an earlier
// kernel.
struct Part {
    int request, kv_head, split, kv_len, num_own, num_old, first_block, end_block, num_used;
    int first_row, num_rows;  // of the window
    int num_keys, first_own;  // all keys; the first row of the window whose key is one of them

    __device__ explicit Part(const Windows& w) {
        // Without clusters some splits may have no keys. They come last in the grid, so that they
        // do not take multiprocessors from those with keys.
        const int tile = w.in_clusters() ? blockIdx.x / w.splits : blockIdx.x % w.tiles;
        split = w.in_clusters() ? blockIdx.x % w.splits : blockIdx.x / w.tiles;
        request = tile / w.kv_heads;
        kv_head = tile % w.kv_heads;
        kv_len = __ldcg(w.kv_lens + request);
        first_row = w.offsets == nullptr ? request * w.window : __ldcg(w.offsets + request);
        num_rows =
            w.offsets == nullptr ? w.window : __ldcg(w.offsets + request + 1) - first_row;
        num_own = num_rows -
            (w.num_padding == nullptr ? 0 : static_cast<int>(__ldcg(w.num_padding + request)));
        num_old = min(max(kv_len - num_own, 0), w.max_len);
        const int num_new = min(num_own, kv_len);  // padding rows may have positions below 0
        num_keys = num_old + num_new;
        first_own = num_rows - num_new;
        const int blocks = (num_old + KEYS - 1) / KEYS;
        const int number = min(max((num_old - 1) / w.min_keys, 1), w.splits);
        const int share = max((blocks + number - 1) / number, 1);
        num_used = max((blocks + share - 1) / share, 1);
        first_block = min(split * share, blocks);
        end_block = min(first_block + share, blocks);
    }
    __device__ bool has_window() const { return split == num_used - 1; }
    // The end of its blocks, with those of the window's own keys.
    __device__ int last_block() const {
        return has_window() ? (num_keys + KEYS - 1) / KEYS : end_block;
    }
};

// A row of keys or values in a tile as the pool stores it.
struct Line {
    const uint4* tile;
    int row;

    // Row `row` of a block: in its tile, or, from the first key of the window on, among its own.
    __device__ Line(const Part& part, const uint4* tile, const uint4* own, int block, int row)
        : tile(tile), row(row) {
        const int place = block * KEYS + row - part.num_old;
        if (place < 0) return;
        this->tile = own;
        this->row = min(part.first_own + place, part.num_rows - 1);
    }
    __device__ const uint4* piece(int index) const { return tile + stored_place(row, index); }
};

// Copies the tiles of one warp into its ring, keys and values alternating.
struct Stream {
    const Windows& w;
    const Part& part;
    uint4* ring;
    int lane, first, block, num_blocks, pages, fetched, taken;
    bool is_value;
    const Stored* source;

    __device__ Stream(const Windows& w, const Part& part, uint4* ring, int warp, int lane)
        : w(w), part(part), ring(ring), lane(lane), first(part.first_block + warp), block(first),
          num_blocks(0), pages(0), fetched(0), taken(0), is_value(false), source(nullptr) {
#pragma unroll 1
        for (int i = 0; i < DEPTH - 1; ++i) fetch();
    }
    // Finds the current block in the pool. Each lane holds the page of one of the next 32 blocks.
    __device__ void locate() {
        if (num_blocks % 32 == 0) {
            const int ahead = block + lane * WARPS;
            if (ahead < part.end_block) {
                const i64 row = static_cast<i64>(part.request) * w.table_stride;
                pages = __ldcg(w.block_tables + row + (ahead * KEYS >> w.page_shift));
            }
        }
        const i64 page = __shfl_sync(~0u, pages, num_blocks % 32);
        const i64 first = (page << w.page_shift) + (block * KEYS & (1 << w.page_shift) - 1);
        source = w.layer + (first + lane / STORED_PIECES) * w.token_stride() +
            part.kv_head * HEAD_DIM + lane % STORED_PIECES * STORED_PIECE;
    }
    __device__ void fetch() {
        if (block < part.end_block) {
            if (!is_value) locate();
            const Stored* from = is_value ? source + w.value_offset : source;
            uint4* to = ring + fetched * TILE;
            const int num_present = part.num_old - block * KEYS;
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                const int row = lane / STORED_PIECES + i * COPY_ROWS;
                copy_piece(to + stored_place(row, lane % STORED_PIECES),
                           from + i * COPY_ROWS * w.token_stride(), row < num_present);
            }
            if (is_value) {
                block += WARPS;
                ++num_blocks;
            }
            is_value = !is_value;
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        fetched = fetched == DEPTH - 1 ? 0 : fetched + 1;
    }
    // Waits for the oldest tile and returns it. The slot of the tile before it is refilled.
    __device__ const uint4* take() {
        asm volatile("cp.async.wait_group %0;" :: "n"(DEPTH - 2) : "memory");
        __syncwarp();
        fetch();
        const uint4* tile = ring + taken * TILE;
        taken = taken == DEPTH - 1 ? 0 : taken + 1;
        return tile;
    }
};
