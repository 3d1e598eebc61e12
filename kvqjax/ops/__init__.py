"""Operations on arrays that know nothing of models or methods: attention, packed storage, finite
numbers."""
